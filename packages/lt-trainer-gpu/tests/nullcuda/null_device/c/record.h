// The log of the null device: one line per event, "KIND TEXT", in the file that NULLCUDA_LOG names.
#pragma once
void record(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
