"""Shared code of the benchmarks.

* ``shapes``: layers of real models, and how tokens are spread over experts.
* ``timing``: interleaved arms, on a GPU's clock or on the host's.
* ``gates``: what a result must pass before it is timed.
* ``report``: medians, ratios, tables and result files.
* ``command``: options of the scripts, and the loop over their cases.

A script says what is compared, on which shapes, and with what gate.
"""

import sys
from pathlib import Path

# The gates make their operands and oracles as the tests do, and a script's own folder alone is on the path.
ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
