"""The start of an engine core's helper processes for grammars: `compiler` and `tokenizer_info`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from minisgl_backend.process.spawn import TIED, begin_child

NICENESS = 10  # otherwise two slow compilations would take both CPUs of a small machine from the engine
ALL_IMPORTS = "--all-imports"


@dataclass(frozen=True)
class Helper:
    """This helper process, with its connection to the engine core."""

    connection: Connection
    options: argparse.Namespace

    def stubbed(self, packages: Sequence[str]) -> Sequence[str]:
        """Those of the packages that stubs replace."""
        return () if self.options.all_imports else packages

    @contextlib.contextmanager
    def or_retry_with_all_imports(self) -> Iterator[None]:
        """If the block fails with stubs, restarts the process with all packages."""
        try:
            yield
        except Exception:
            if self.options.all_imports:
                raise
            os.execv(sys.executable, [*sys.orig_argv, ALL_IMPORTS])


def begin_helper(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> Helper:
    """Called first in a helper process. `parser` has the options of that process."""
    parser.add_argument("--fd", type=int, required=True, help="a connection to the engine core")
    parser.add_argument(TIED, action="store_true")
    parser.add_argument(ALL_IMPORTS, action="store_true", help="with all packages that are left out otherwise")
    options = parser.parse_args(arguments)
    begin_child("grammars", "WARNING", tied=options.tied)
    if not options.all_imports:  # a restarted process has done this already
        os.nice(NICENESS)
    with contextlib.suppress(OSError):
        # If memory runs out, the kernel is to kill helpers first.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    return Helper(Connection(options.fd), options)
