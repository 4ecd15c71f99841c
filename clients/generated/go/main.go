// A job from enqueue to ack, through the client that openapi-generator makes.
package main

import (
	"context"
	"fmt"
	"os"

	fencepost "fencepost.example/client"
)

func must(ok bool, what interface{}) {
	if !ok {
		fmt.Fprintln(os.Stderr, "failed:", what)
		os.Exit(1)
	}
}

func main() {
	queue, worker := "client-go", "go"
	configuration := fencepost.NewConfiguration()
	configuration.Servers = fencepost.ServerConfigurations{{URL: os.Getenv("FENCEPOST_URL")}}
	client := fencepost.NewAPIClient(configuration)
	ctx := context.WithValue(context.Background(), fencepost.ContextAccessToken, os.Getenv("FENCEPOST_KEY"))

	enqueue := fencepost.NewEnqueueRequest("greet")
	enqueue.SetQueue(queue)
	enqueue.SetPayload(map[string]interface{}{"name": "Ada"})
	job, _, err := client.JobsAPI.JobsCreate(ctx).EnqueueRequest(*enqueue).Execute()
	must(err == nil, err)
	poll := fencepost.NewPollRequest([]string{queue}, worker)
	poll.SetWaitSeconds(5)
	polled, _, err := client.WorkersAPI.WorkersPoll(ctx).PollRequest(*poll).Execute()
	must(err == nil && len(polled.Jobs) == 1 && polled.Jobs[0].Id == job.Id, err)
	leased := polled.Jobs[0]
	beat := fencepost.NewJobHeartbeatRequest(leased.Id, worker)
	beat.SetAttempt(leased.Attempt)
	beat.SetLeaseId(leased.LeaseId)
	sent := fencepost.JobHeartbeatRequestAsHeartbeatRequest(beat)
	beaten, _, err := client.WorkersAPI.WorkersHeartbeat(ctx).HeartbeatRequest(sent).Execute()
	must(err == nil && beaten.GetStatus() == fencepost.HEARTBEAT_STATUS_OK, err)
	ack := fencepost.NewAckRequest(leased.Id, fencepost.ACK_STATUS_SUCCEEDED, worker)
	ack.SetAttempt(leased.Attempt)
	ack.SetLeaseId(leased.LeaseId)
	acked, _, err := client.WorkersAPI.WorkersAck(ctx).AckRequest(*ack).Execute()
	must(err == nil && acked.Action == fencepost.ACK_ACTION_DONE, err)
	done, _, err := client.JobsAPI.JobsGet(ctx, job.Id).Execute()
	must(err == nil && done.State == fencepost.JOB_STATE_SUCCEEDED, err)
	_, missing, err := client.JobsAPI.JobsGet(ctx, "job_01m7w3ha3aextt8pkwwdmxsmqw").Execute()
	must(err != nil && missing.StatusCode == 404, err)
	fmt.Println("worked", job.Id)
}
