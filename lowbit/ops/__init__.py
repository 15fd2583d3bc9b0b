"""The ops ``torch.ops.lowbit.*``: schemas and fakes (schema), gradients (gradient), and the public call (launch)."""
