import sys
import time

if len(sys.argv) > 1:
    time.sleep(float(sys.argv[1]))
sys.exit("nothing to see here")
