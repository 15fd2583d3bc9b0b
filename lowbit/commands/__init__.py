"""What the command line does, one file a command."""
