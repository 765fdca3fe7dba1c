"""``adopt``: makes a past run the standard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from e2e_registry.cli import options
from e2e_registry.cli.output import print_json


def adopt(
    test: Annotated[str, typer.Option("--test", help="The test whose standard it becomes.")],
    run: Annotated[Path, typer.Option("--run", help="The directory of a kept run of that test.")],
    allow_other_source: options.AllowOtherSource = False,
    allow_unknown_state: options.AllowUnknownState = False,
    reason: options.Reason = None,
    all_metrics: options.AllMetrics = False,
    json: options.Json = False,
) -> None:
    """Make a past run the standard of its test, marked "repeat unproven"."""
    from e2e_registry.operations.record import adopt_run
    from e2e_registry.registration import find_test
    from e2e_registry.reports.console import make_console
    from e2e_registry.reports.recording import print_change

    settings = options.settings(test)
    registration = find_test(settings, test)
    result = adopt_run(
        registration,
        settings,
        run,
        allow_other_source=allow_other_source,
        allow_unknown_state=allow_unknown_state,
        reason=reason,
    )
    if json:
        print_json(result.to_json())
    else:
        print_change(result, make_console(), all_metrics=all_metrics)
    raise typer.Exit(result.exit_code)
