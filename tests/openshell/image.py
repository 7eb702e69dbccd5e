#!/usr/bin/env python3
"""Makes a root file system with this Python and cloudpickle: image.py TREE SITE INTO

TREE: a root file system to begin with. SITE: the site-packages folder that has cloudpickle. INTO: where it is made.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig

LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*", "dist-packages", "*.opt-*.pyc"
)


def libraries(program):
    """The shared libraries of a program, and its loader."""
    out = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+) \(0x", out)


def main():
    tree, site, into = sys.argv[1:]
    shutil.copytree(tree, into, symlinks=True)
    python = os.path.realpath(sys.executable)
    stdlib = sysconfig.get_path("stdlib")
    os.makedirs(f"{into}/usr/bin", exist_ok=True)
    shutil.copy2(python, f"{into}/usr/bin/{os.path.basename(python)}")
    os.symlink(os.path.basename(python), f"{into}/usr/bin/python")
    shutil.copytree(stdlib, into + stdlib, symlinks=False, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
    shutil.copytree(f"{site}/cloudpickle", f"{into}{stdlib}/cloudpickle")
    needed = {lib for program in [python, *glob.glob(f"{stdlib}/lib-dynload/*.so")] for lib in libraries(program)}
    for library in sorted(needed):
        os.makedirs(into + os.path.dirname(library), exist_ok=True)
        shutil.copy2(library, into + library)


if __name__ == "__main__":
    main()
