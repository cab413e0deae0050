"""SageMaker training jobs: client, container entry point and publisher.

The client builds and checks CreateTrainingJob requests (`request`, `constraints`, `client`); the container entry point
implements the `/opt/ml` contract (`contract`, `entrypoint`); the publisher prints CreateAlgorithm (`algorithm`). Only
`client` imports boto3.
"""
