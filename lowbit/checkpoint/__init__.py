"""Files: lowbit's own format (native.py) and, one file each, the formats of others."""
