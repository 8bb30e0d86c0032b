"""The services that other tests stand on keep what those tests take for granted."""

from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from tests.services import Service


def test_of_eight_that_create_one_object_exactly_one_succeeds(s3: Service) -> None:
    store = S3Store(
        "store",
        endpoint=s3.uri,
        access_key_id=s3.env["AWS_ACCESS_KEY_ID"],
        secret_access_key=s3.env["AWS_SECRET_ACCESS_KEY"],
        region=s3.env["AWS_DEFAULT_REGION"],
        client_options={"allow_http": True},
    )

    def create(name: str, who: int) -> bool:
        try:
            obstore.put(store, name, str(who).encode(), mode="create")
            return True
        except AlreadyExistsError:
            return False

    with ThreadPoolExecutor(8) as threads:
        for round_ in range(40):
            name = f"test-services/{round_}"
            won = list(threads.map(lambda who, name=name: create(name, who), range(8)))
            assert won.count(True) == 1
            assert obstore.get(store, name).bytes() == str(won.index(True)).encode()


@pytest.mark.slow
def test_the_mlflow_server_keeps_runs_in_postgresql_and_texts_on_s3(mlflow_server: Service, s3: Service) -> None:
    import boto3
    import mlflow

    client = mlflow.MlflowClient(mlflow_server.uri)
    run = client.create_run(client.create_experiment("services"))
    client.log_text(run.info.run_id, "hello", "a/b.txt")
    bucket = boto3.client(
        "s3",
        endpoint_url=s3.uri,
        aws_access_key_id=s3.env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=s3.env["AWS_SECRET_ACCESS_KEY"],
        region_name=s3.env["AWS_DEFAULT_REGION"],
    )
    keys = [item["Key"] for item in bucket.list_objects_v2(Bucket="mlflow", Prefix="artifacts")["Contents"]]
    assert [key for key in keys if run.info.run_id in key and key.endswith("a/b.txt")]
