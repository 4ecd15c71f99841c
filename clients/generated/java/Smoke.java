// A job from enqueue to ack, through the client that openapi-generator makes for Java.

import fencepost.ApiClient;
import fencepost.ApiException;
import fencepost.api.JobsApi;
import fencepost.api.WorkersApi;
import fencepost.model.AckAction;
import fencepost.model.AckRequest;
import fencepost.model.AckStatus;
import fencepost.model.EnqueueRequest;
import fencepost.model.HeartbeatRequest;
import fencepost.model.HeartbeatStatus;
import fencepost.model.Job;
import fencepost.model.JobHeartbeatRequest;
import fencepost.model.JobState;
import fencepost.model.PollRequest;
import fencepost.model.PolledJob;
import java.util.List;
import java.util.Map;

public class Smoke {
    static void must(boolean holds, Object seen) {
        if (!holds) throw new AssertionError(String.valueOf(seen));
    }

    public static void main(String[] arguments) throws ApiException {
        String queue = "client-java", worker = "java";
        ApiClient client = new ApiClient();
        client.updateBaseUri(System.getenv("FENCEPOST_URL"));
        String key = "Bearer " + System.getenv("FENCEPOST_KEY");
        client.setRequestInterceptor(request -> request.header("Authorization", key));
        JobsApi jobs = new JobsApi(client);
        WorkersApi workers = new WorkersApi(client);

        EnqueueRequest enqueue = new EnqueueRequest().jobType("greet").queue(queue);
        Job job = jobs.jobsCreate(enqueue.payload(Map.of("name", "Ada")), null, null, null);
        PollRequest poll = new PollRequest().workerId(worker).queues(List.of(queue)).waitSeconds(5);
        PolledJob leased = workers.workersPoll(poll).getJobs().get(0);
        must(leased.getId().equals(job.getId()), leased);
        JobHeartbeatRequest beat = new JobHeartbeatRequest()
            .jobId(leased.getId()).workerId(worker).attempt(leased.getAttempt()).leaseId(leased.getLeaseId());
        HeartbeatStatus status = workers.workersHeartbeat(new HeartbeatRequest(beat)).getStatus();
        must(status == HeartbeatStatus.HEARTBEAT_STATUS_OK, status);
        AckRequest ack = new AckRequest()
            .jobId(leased.getId()).workerId(worker).attempt(leased.getAttempt()).leaseId(leased.getLeaseId());
        AckAction action = workers.workersAck(ack.status(AckStatus.ACK_STATUS_SUCCEEDED)).getAction();
        must(action == AckAction.ACK_ACTION_DONE, action);
        Job done = jobs.jobsGet(job.getId(), null);
        must(done.getState() == JobState.JOB_STATE_SUCCEEDED, done);
        try {
            must(false, jobs.jobsGet("job_01m7w3ha3aextt8pkwwdmxsmqw", null));
        } catch (ApiException error) {
            must(error.getCode() == 404, error);
        }
        System.out.println("worked " + job.getId());
    }
}
