"""The checker behind the shape annotations while tests run (see pyproject.toml): beartype, with an int allowed where a
float is asked for, as PEP 484 has it."""

from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
