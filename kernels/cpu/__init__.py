"""The native library: ops in C++ over raw pointers, built on the machine that runs them."""
