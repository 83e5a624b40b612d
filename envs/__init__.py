"""unitymas.envs"""
