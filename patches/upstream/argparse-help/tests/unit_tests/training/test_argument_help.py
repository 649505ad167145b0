# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import argparse

from megatron.training.arguments import add_megatron_arguments


def test_help_of_every_argument_can_be_formatted():
    """argparse expands the help of an argument with %, so that a bare % ends --help in an error."""
    parser = add_megatron_arguments(argparse.ArgumentParser())
    formatter = parser._get_formatter()

    failures = {}
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (KeyError, TypeError, ValueError) as error:
            failures['/'.join(action.option_strings)] = str(error)

    assert not failures
    assert '--mhc-recompute-layer-num' in parser.format_help()
