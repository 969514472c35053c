"""What the script says of its times."""

import pytest


def test_what_is_hidden_and_won(load):
    """Half of the exchange takes no time beside the GEMM; what is won counts from how a layer does it."""
    script = load("expert_parallel_overlap")
    shares = script.TODAY, script.Share(48, 16)
    times = {"route": 20.0}
    for exchange, gemm in script.PAIRS.items():
        times |= {f"{exchange}: 264 blocks": 280.0, f"{exchange}: 48 blocks": 300.0}
        times |= {f"{gemm}: 0 left": 500.0, f"{gemm}: 16 left": 550.0, f"{gemm} in pieces: whole": 500.0}
        both = {share: us for share, us in zip(shares, (780.0, 700.0), strict=True)}
        times |= {f"{exchange} beside {gemm}: {share}": us for share, us in both.items()}
    said = [line.split() for line in script.lines(times, shares)]
    header = ["blocks", "left", "exchange", "GEMM", "both", "hidden", "won"]
    table = [header, ["264", "0", "280.0", "500.0", "780.0", "0.00", "0.0"]]
    table.append(["48", "16", "300.0", "550.0", "700.0", "0.50", "80.0"])
    assert said[:4] == [["dispatch", "beside", "FC1,", "us"], *table]
    assert said[4:8] == [["combine", "beside", "FC2,", "us"], *table]
    assert [line[:1] for line in said[8:]] == [["route"], ["FC1"], ["FC2"]]
    assert said[9][-2:] == ["500.0", "us"]


@pytest.mark.parametrize("option", [(), ("--quick",)])
def test_todays_share_comes_first(load, option):
    """All others are measured by it."""
    script = load("expert_parallel_overlap")
    shares = script.QUICK if script.arguments(option).quick else script.SHARES
    assert shares[0] == script.TODAY
    assert len(set(shares)) == len(shares)
