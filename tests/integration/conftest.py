"""What tests with servers and processes need before the first of them begins."""

from tests.native_library import build_native_library

# Else the first workers after a change of the sources would build it: 17 s of two cores, three times that in a crowd.
build_native_library()
