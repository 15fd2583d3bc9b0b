"""What a build, a wheel and their checks need; nothing of it is installed."""
