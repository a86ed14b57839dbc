"""What makes a stored time stale: code does, comments do not."""

import pytest

from kdatune_kernels import identity

SOURCE = '''"""A module."""

# how it is done
def f(x):
    """A function."""
    return x + 1  # one more


class A:
    """Only a docstring."""
'''


def test_comments_docstrings_and_layout_do_not_count():
    same = 'def f(x):\n    "Said otherwise."\n    return (x +\n            1)\nclass A:\n    pass\n'
    assert identity.code_of(SOURCE) == identity.code_of(same)


@pytest.mark.parametrize("change", [("x + 1", "x + 2"), ("def f(x)", "def g(x)"), ("class A", "class B")])
def test_code_counts(change):
    assert identity.code_of(SOURCE) != identity.code_of(SOURCE.replace(*change))


def test_the_form_of_an_f_string_does_not_hang_on_the_python():
    """ast.unparse quotes it otherwise from 3.12 on: a service and a tuner of different Pythons found each other stale."""
    source = "x = f\"{', '.join(names)!r:>{width}} of it\"\n"
    assert identity.code_of(source) == "x = ((', '.join(names), 114, ('>', (width, -1, None))), ' of it')"
    assert identity.code_of(source) != identity.code_of(source.replace("of it", "of them"))


def test_every_kernel_source_is_there_and_counts(monkeypatch):
    whole = identity.kernel_hash.__wrapped__()
    assert len(whole) == 16
    for name in identity.KERNEL_SOURCES:
        monkeypatch.setattr(identity, "KERNEL_SOURCES", tuple(n for n in identity.KERNEL_SOURCES if n != name))
        assert identity.kernel_hash.__wrapped__() != whole
        monkeypatch.undo()
