"""Other people's launch configurations read, and plans written in their words; one folder = one framework.

`read(framework, path)` gives an `Imported`, `job.build` makes a planning problem of it, `export.overrides` goes back.
"""

from nereus.integrations.imported import Imported, Part, Refusal, RefusedImportError
from nereus.integrations.reading import FRAMEWORKS, read, read_text

__all__ = ["FRAMEWORKS", "Imported", "Part", "Refusal", "RefusedImportError", "read", "read_text"]
