"""`kvcellar plan`: whether the regions of these settings would fit, and which limit binds."""

import json
import sys
from collections.abc import Mapping

from kvcellar.cli.forecast import Forecast, forecast
from kvcellar.cli.sizes import mebibytes, table
from kvcellar.contract import MAX_CAPACITY_BYTES, PlanBody, printable, to_json
from kvcellar.daemon.config import Settings
from kvcellar.region import memory


def run(instead: Mapping[str, str], *, as_json: bool) -> int:
    """Print the plan.

    Args:
        instead: settings that count instead of the environment's, by the variable's name.
        as_json: print the body of `/v1/plan` and nothing else.

    Raises:
        DoesNotFit: they would not; the plan was printed before.
        ConfigurationError: settings or a volume that no region can be made with.
    """
    told = forecast(Settings.load(**instead))
    body = memory.to_body(told.plan)
    sys.stdout.write(json.dumps(to_json(body)) + "\n" if as_json else shown(told, body))
    if not told.plan.fits:
        raise told.plan.refusal(",".join(told.engine_ids))
    return 0


def shown(told: Forecast, body: PlanBody) -> str:
    """The plan as a table."""
    named = ", ".join(dict.fromkeys(told.engine_ids))
    facts = {
        "regions": f"{len(told.engine_ids)} x {mebibytes(told.capacity_bytes)}: {named}",
        "asked": mebibytes(body.askedBytes),
        "free": mebibytes(body.freeBytes) if body.freeBytes < MAX_CAPACITY_BYTES else "no limit",
        "promised": f"{mebibytes(told.plan.promised_bytes)} to other regions",
        "binds": body.bindingLimit or "nothing",
        "fits": "yes" if body.fits else "no",
    }
    head = "".join(f"{name:<9} {printable(text)}\n" for name, text in facts.items())
    rows = [("LIMIT", "SIZE", "IN USE", "BINDS")]
    for limit in body.limits:
        sizes = (mebibytes(limit.limitBytes), mebibytes(limit.usageBytes))
        rows.append((printable(limit.name), *sizes, "yes" if limit.binding else ""))
    return f"{head}\n{table(rows)}"
