"""Call a function that another process has pickled: ``python call.py FILE RANK``; see ``torchrun.call``."""

import pickle
import sys

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        function, arguments = pickle.load(file)
    function(int(sys.argv[2]), *arguments)
