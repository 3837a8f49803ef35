"""`minisgl bench`: puts load on a server, measures the responses, and compares such measurements.

    workload  what is asked and when   targets  whom    generator  asks    figures  what it adds up to
    command   the options              report   tables and files           compare  several files, as a picture

perf_runs drives NVIDIA's perf_analyzer instead of the generator.
"""
