"""Which kernel serves a product, and what it would take."""
