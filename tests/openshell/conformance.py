#!/usr/bin/env python3
"""Drives a gateway with the unmodified client of PyPI (openshell 0.1.5), and checks what that client relies on.

    conformance.py --endpoint 127.0.0.1:PORT --image NAME [--no-guest] [--torpor PROGRAM]

Each check prints one line. The exit code is the number of those that failed. With --no-guest, what needs a running guest
is left out (the sim driver). --torpor: the program that puts a sandbox to sleep, which the client has no call for.
"""

import argparse
import sys
import time
import traceback

import harness

# They are registered, and run, in this order.
import checks_records  # noqa: F401
import checks_use  # noqa: F401
import checks_life  # noqa: F401


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--image", default="")
    parser.add_argument("--torpor", default="torpor")
    parser.add_argument("--no-guest", action="store_true")
    arguments = parser.parse_args()
    world = harness.World(arguments)
    passed, failed = 0, []
    for name, function, guest in harness.CHECKS:
        if guest and arguments.no_guest:
            continue
        began = time.monotonic()
        try:
            function(world)
        except Exception:  # noqa: BLE001 - whatever it is, the check has failed
            failed.append(name)
            print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
        else:
            passed += 1
            print(f"ok    {name} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{passed} checks passed, {len(failed)} failed", flush=True)
    world.client.close()
    sys.exit(min(len(failed), 100))


if __name__ == "__main__":
    main()
