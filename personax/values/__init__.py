"""Configuration as values, and the tables of what a configuration can name.

A *value* is a frozen dataclass that prints, compares and hashes, and whose numbers are pytree leaves. A field annotated
`Static[...]` is part of the program (a count, a name): changing it recompiles. Every other field is a number or another
value: changing it does not recompile, and `vmap` can sweep over it.

An *axis* is a table of kinds (all objectives, all partitions, ...). Each kind is registered next to its class or
function. `Axis.make` builds a value from a TOML table, following the annotations of its kind's parameters.

`personax compare --tune` varies by default the parameters annotated `Tuned[...]` (a positive number, such as a step
size) or `TunedShare[...]` (a number from 0 to 1).
"""

from personax.values.axes import (
    BATCH_SIZES,
    CONTROLLERS,
    CURVATURES,
    DATASETS,
    DELAY_TIMES,
    DELAYS,
    DISCOUNTS,
    MODELS,
    OBJECTIVES,
    OPTIMIZERS,
    PARTITIONS,
    RECIPES,
    SERVERS,
    STEP_SIZES,
    Axis,
    Kind,
    axis_of,
    call,
    construct,
    name_of,
    options_of,
    parameters_of,
)
from personax.values.checks import (
    ConfigError,
    check_names,
    did_you_mean,
    require,
    require_count,
    require_nonnegative,
    require_one_of,
    require_positive,
    unknown_name,
)
from personax.values.fields import Static, Tuned, TunedShare, tuned_as, value
from personax.values.imports import (
    NotInstalled,
    imported,
    imports_forbidden,
    imports_in,
    optional_import,
    require_imports_allowed,
)
from personax.values.tables import short_repr, to_dict

__all__ = [
    "BATCH_SIZES",
    "CONTROLLERS",
    "CURVATURES",
    "DATASETS",
    "DELAYS",
    "DELAY_TIMES",
    "DISCOUNTS",
    "MODELS",
    "OBJECTIVES",
    "OPTIMIZERS",
    "PARTITIONS",
    "RECIPES",
    "SERVERS",
    "STEP_SIZES",
    "Axis",
    "ConfigError",
    "Kind",
    "NotInstalled",
    "Static",
    "Tuned",
    "TunedShare",
    "axis_of",
    "call",
    "check_names",
    "construct",
    "did_you_mean",
    "imported",
    "imports_forbidden",
    "imports_in",
    "name_of",
    "optional_import",
    "options_of",
    "parameters_of",
    "require",
    "require_count",
    "require_imports_allowed",
    "require_nonnegative",
    "require_one_of",
    "require_positive",
    "short_repr",
    "to_dict",
    "tuned_as",
    "unknown_name",
    "value",
]
