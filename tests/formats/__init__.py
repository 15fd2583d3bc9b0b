"""Tests of the formats of others: one file a format, each with a writer of its own, in plain loops."""
