"""Do the tests bite? Each mutation breaks the code on purpose and must turn a named test red."""
