"""unitymas.agents"""
