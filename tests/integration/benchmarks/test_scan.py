"""The scan benchmark on a small fleet: what it counts and finds. Times are not looked at."""

import time

import pytest

from benchmarks import scan
from benchmarks.scan_fleet import GPUS_PER_NODE
from nodemend.catalogue import load_catalogue
from nodemend.domain.faults import Family

NODES = 20
CATALOGUE = load_catalogue()


@pytest.mark.parametrize("is_sick", [False, True], ids=["healthy", "sick"])
def test_a_small_fleet_is_measured_whole(is_sick):
    result = scan.measure(NODES, is_sick=is_sick, pairs=1, now=time.time())

    gpus = NODES * GPUS_PER_NODE
    assert result["gpus"] == gpus
    for family, one in result["families"].items():
        assert one["queries"] == len(CATALOGUE.of_family(family))
        assert one["samples"] == sum(one["samples_by_rule"].values())
        assert set(one["alone_s"]) == {rule.id for rule in CATALOGUE.of_family(family)}
        assert 20 < one["peak_mib"] < 500
        assert one["findings"] == 0 if not is_sick else one["findings"] >= gpus
    ecc = result["families"][Family.ECC]
    # Each reads one value of each GPU.
    assert ecc["samples_by_rule"]["row-remap-failed"] == gpus
    assert ecc["samples_by_rule"]["ecc-dbe-volatile"] == gpus
    assert ecc["gpus"] == (gpus if is_sick else 0)
    assert ecc["per_gpu_minute"] == pytest.approx(
        ecc["samples_per_gpu"] + ecc["recorded_per_gpu_minute"], abs=0.02
    )
    assert result["month"]["scan_samples"] >= 30 * 24 * 60 * ecc["samples"]
    assert {name for name, one in result["recordings"].items() if not one["samples"]} <= {
        # A day's sum of increments, of which a fleet without errors has none.
        "nodemend:gpu_ecc_sbe:increase24h"
    }
