"""Find the tools of this machine that some tests need."""

import os
import shutil


def has_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler: the one named by CXX, or g++."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def browser() -> str | None:
    """Return the path of Chromium or Chrome, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
