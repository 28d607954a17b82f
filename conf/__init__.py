"""The configuration: one folder per choice. This file makes it a package, in which the console script finds it."""
