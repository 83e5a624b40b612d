"""unitymas.benchmarks"""
