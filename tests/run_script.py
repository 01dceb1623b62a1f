"""Run the script named first as ``python SCRIPT ARGUMENTS`` does, in the script's own folder."""

import os
import runpy
import sys

if __name__ == "__main__":
    assert "preloaded" in sys.modules, "the server has failed to import what ranks need"
    del sys.argv[0]
    folder = os.path.dirname(sys.argv[0])
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:  # torchrun waits for a return value of a worker that exits with 0
            raise
