"""A small, honest reader of launch scripts: what the command line would be, and which variables the script leaves open.

Not a shell: nothing is run, no file but sourced ones is opened, and what cannot be known stays a visible `${NAME}`.
"""

from nereus.integrations.shell.interpret import Command, Script, interpret
from nereus.integrations.shell.lexer import ShellSyntaxError

__all__ = ["Command", "Script", "ShellSyntaxError", "interpret"]
