# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_muon.plan``: the command of :mod:`megatron_muon.report.command`."""

import sys

from megatron_muon.report.command import main

if __name__ == "__main__":
    sys.exit(main())
