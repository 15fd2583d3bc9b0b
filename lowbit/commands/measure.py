"""What `lowbit demo` and `lowbit eval` measure: how far a model is from the float model, its size and its speed."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from pathlib import Path

import torch

from ..errors import FormatError, LowbitError
from .corpus import sentences

ROUNDS = 5  # timed runs of the float and of the quantized model, in turns; the median counts


def load(folder: Path, kind: str, dtype: torch.dtype = torch.float32):
    """(model on the CPU, in dtype, tokenizer) of a checkpoint folder; ``kind`` as :func:`corpus.kind_of_checkpoint`.

    Raises LowbitError without transformers, FormatError where the folder does not load or lacks tensors.
    """
    try:
        import transformers
    except ImportError:
        raise LowbitError("this command needs transformers, which is not installed: pip install 'lowbit[hf]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM if kind == "causal" else transformers.AutoModel
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model, found = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # Why: a broken file raises whatever its parser raises; the user needs the file's name
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"the checkpoint {folder} does not load with transformers: {reason}") from error
    missing = sorted(name for name in found["missing_keys"] if "pooler" not in name)
    if missing:  # transformers would go on with random weights
        raise FormatError(f"the checkpoint {folder} lacks {len(missing)} tensors, the first is {missing[0]}")
    return model.eval(), tokenizer


def size_as_saved(model, item: int) -> dict:
    """Bytes of a model in the canonical form: quantized Linears as they are, other floats with ``item`` bytes a number.

    A tensor that two modules share counts once. Keys: linear_bytes, linear_weights, total_bytes.
    """
    from ..nn import Linear
    from ..weight_holder import HELD

    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    packed = {f"{name}.{part}" for name in layers for part in HELD}
    linear, other, seen = 0, 0, set()
    for name, tensor in model.state_dict().items():
        if name in packed:
            linear += tensor.nbytes
        elif tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            other += tensor.numel() * (item if tensor.is_floating_point() else tensor.itemsize)
    weights = sum(m.in_features * m.out_features for m in layers.values())
    return {"linear_bytes": linear, "linear_weights": weights, "total_bytes": linear + other}


def speeds(meter, models, progress) -> list[list[float]]:
    """For each model what ``meter.speed`` says in ROUNDS rounds, in turns, so that all see the same machine."""
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([meter.speed(model) for model in models])
        progress.step()
    return [list(column) for column in zip(*rounds)]


class CausalMeter:
    """Bits a byte and perplexity of a text, KL to the float model's next-token distribution, greedy tokens a second."""

    columns = (
        ("bits_a_byte", "bits a byte", "{:.4f}"),
        ("kl", "KL to float", "{:.5f}"),
        ("same", "same top token", "{:.1%}"),
        ("rate", "tokens/s", "{:.0f}"),
    )
    about = (
        "KL: mean over the text, in bits a token, from the float model's prediction of the next token.",
        f"tokens/s: greedy, one sequence, KV cache; the median token of {ROUNDS} runs, in turns with the float model.",
    )

    def __init__(self, model, tokenizer, text: str, window: int = 512):
        """window: tokens that see each other, at most what the model can; windows follow each other without overlap."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        self.skip = [name for name, module in model.named_modules() if module is head]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        first, self.bytes = config.bos_token_id, len(text.encode())
        if not isinstance(first, int):  # without a start token nothing predicts the first one: it is not scored
            first, *ids = ids
            self.bytes -= len(tokenizer.decode([first]).encode())
        limit = getattr(config, "max_position_embeddings", None) or 512
        self.window = window = min(window, limit)
        tokens = torch.tensor([first, *ids])
        count = len(ids) // window
        per_batch = max(1, min(16, (1 << 25) // (window * config.vocab_size)))  # logits of a batch: at most 128 MB
        inputs = tokens[:-1][: count * window].view(count, window).split(per_batch)
        targets = tokens[1:][: count * window].view(count, window).split(per_batch)
        self.batches = list(zip(inputs, targets, strict=True))
        if len(ids) > count * window:
            self.batches.append((tokens[None, count * window : -1], tokens[None, count * window + 1 :]))
        self.steps, self.tokens = len(self.batches), len(ids)
        self.float_log_p = []  # the float model's predictions, where they take little memory
        self.keep = len(ids) * config.vocab_size <= 1 << 26
        self.prompt = tokens[None, : min(64, limit // 4)]
        self.new = min(128, limit - self.prompt.shape[1] - 1)

    @torch.inference_mode()
    def quality(self, model, reference, progress) -> dict:
        """bits_a_byte and perplexity of ``model``; with a ``reference`` also kl and same (share of equal top tokens).

        The first call is for the float model, which is the reference of all others.
        """
        bits = kl = same = 0.0
        for i, (inputs, targets) in enumerate(self.batches):
            inputs, targets = inputs.to(model.device), targets.to(model.device)
            log_p = torch.log_softmax(model(inputs).logits.float(), -1)
            bits -= float(log_p.gather(-1, targets[..., None]).sum(dtype=torch.float64))
            if reference is None and self.keep:
                self.float_log_p.append(log_p)
            if reference is not None:
                log_q = self.float_log_p[i] if self.keep else torch.log_softmax(reference(inputs).logits.float(), -1)
                kl += float((log_q.exp() * (log_q - log_p)).sum(dtype=torch.float64))
                same += float((log_q.argmax(-1) == log_p.argmax(-1)).sum())
            progress.step()
        row = {"bits_a_byte": bits / math.log(2) / self.bytes, "perplexity": math.exp(bits / self.tokens)}
        if reference is not None:
            row |= {"kl": kl / math.log(2) / self.tokens, "same": same / self.tokens}
        return row

    @torch.inference_mode()
    def speed(self, model) -> float:
        """Tokens a second after the prompt, from the median token of up to 128, or as many as fit in two seconds.

        Why the median token: a token takes a millisecond, and one that waited for the processor takes several.
        """
        result = model(self.prompt.to(model.device), use_cache=True)
        # Why two names: transformers calls it cache from 5.24 on, and warns of the other one.
        cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        times = []
        while len(times) < self.new and (len(times) < 4 or sum(times) < 2):
            began = time.perf_counter()
            token = result.logits[:, -1:].argmax(-1)
            result = model(token, **{cache: getattr(result, cache)}, use_cache=True)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            times.append(time.perf_counter() - began)
        return 1 / statistics.median(times)


class EncoderMeter:
    """Cosine of sentence embeddings to the float model's, kept nearest neighbours, and sentences a second."""

    columns = (
        ("cosine", "cosine to float", "{:.5f}"),
        ("worst", "worst", "{:.5f}"),
        ("same", "same neighbour", "{:.1%}"),
        ("rate", "sentences/s", "{:.0f}"),
    )
    about = (
        "cosine: between the mean-pooled embeddings of a sentence by both models; mean and worst over the sentences.",
        "same neighbour: sentences whose nearest other sentence stays the same.",
        f"sentences/s: 32 at a time; median of {ROUNDS} runs, in turns with the float model.",
    )

    def __init__(self, model, tokenizer, text: str):
        self.skip = [name for name, _ in model.named_children() if name == "pooler"]  # the mean does not read it
        found = sentences(text, 256)
        limit = min(128, getattr(model.config, "max_position_embeddings", None) or 128)
        options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": limit}
        self.batches = [tokenizer(found[i : i + 32], **options) for i in range(0, len(found), 32)]
        self.bytes, self.steps = sum(len(s.encode()) for s in found), 1
        self.float_embeddings = None

    @torch.inference_mode()
    def embed(self, model, batches) -> torch.Tensor:
        """Unit embeddings float32 [sentences, hidden]: the mean over a sentence's tokens."""
        rows = []
        for batch in batches:
            mask = batch["attention_mask"][..., None].float()
            hidden = model(**batch).last_hidden_state.float()
            rows.append((hidden * mask).sum(1) / mask.sum(1))
        return torch.nn.functional.normalize(torch.cat(rows), dim=-1)

    def quality(self, model, reference, progress) -> dict:
        """With a ``reference``: cosine, worst, same; the reference is the model of the first call."""
        embeddings = self.embed(model, self.batches)
        progress.step()
        if reference is None:
            self.float_embeddings = embeddings
            return {}
        cosine = (embeddings * self.float_embeddings).sum(-1)
        near = [(e @ e.T).fill_diagonal_(-1).argmax(-1) for e in (embeddings, self.float_embeddings)]
        same = (near[0] == near[1]).float().mean()
        return {"cosine": float(cosine.mean()), "worst": float(cosine.min()), "same": float(same)}

    def speed(self, model) -> float:
        """Sentences a second, of the first 64."""
        began = time.perf_counter()
        made = len(self.embed(model, self.batches[:2]))
        return made / (time.perf_counter() - began)
