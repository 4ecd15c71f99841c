// A Fencepost worker that uses only Go's standard library. See docs/worker-guide.md.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

const grace = 25 * time.Second

var (
	url      = env("FENCEPOST_URL", "http://127.0.0.1:7070")
	key      = os.Getenv("FENCEPOST_KEY")
	lease, _ = strconv.Atoi(env("FENCEPOST_LEASE_SECONDS", "30"))
	name     = fmt.Sprintf("go-%d-%s", os.Getpid(), uuid()[:8])
	client   = &http.Client{Timeout: 40 * time.Second}

	errReleased  = errors.New("the grace period has ended: the job is released")
	errLost      = errors.New("the lease is lost")
	errCancelled = errors.New("the job was cancelled")
)

type object map[string]any

type job struct {
	ID      string `json:"id"`
	Attempt int    `json:"attempt"`
	LeaseID string `json:"lease_id"`
	Beat    int    `json:"heartbeat_interval_seconds"`
	Payload struct {
		Name         string  `json:"name"`
		SleepSeconds float64 `json:"sleep_seconds"`
		Fail         bool    `json:"fail"`
	} `json:"payload"`
}

func env(name, other string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return other
}

func uuid() string {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		panic(err)
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// call retries transient errors (network, 408, 429, 5xx) after a pause, and fails on other 4xx.
func call(path string, body, reply any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	for pause := 500 * time.Millisecond; ; pause = min(pause*2, 10*time.Second) {
		status, answer := post(path, text)
		switch {
		case status >= 200 && status < 300:
			return json.Unmarshal(answer, reply)
		case status >= 400 && status < 500 && status != 408 && status != 429:
			return errors.New(string(answer))
		}
		time.Sleep(pause)
	}
}

// post returns status 0 if the server does not answer.
func post(path string, text []byte) (int, []byte) {
	request, err := http.NewRequest("POST", url+"/v1/workers/"+path, bytes.NewReader(text))
	if err != nil {
		return 0, nil
	}
	request.Header.Set("Authorization", "Bearer "+key)
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return 0, nil
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, nil
	}
	return response.StatusCode, answer
}

func min(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}

// handle does your work. Pass ctx to all calls that wait: it is cancelled when the job must stop.
func handle(ctx context.Context, j job) (any, error) {
	select {
	case <-time.After(time.Duration(j.Payload.SleepSeconds * float64(time.Second))):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if j.Payload.Fail {
		return nil, errors.New("asked to fail")
	}
	who := j.Payload.Name
	if who == "" {
		who = "world"
	}
	return object{"greeting": "Hello, " + who + "!"}, nil
}

// wanted is what a poll asks for.
func wanted() object {
	return object{
		"queues": []string{"default"}, "job_types": []string{"greet"}, "lease_seconds": lease,
		// A short wait, so that SIGTERM takes effect soon. A repeat with the same poll_id gets the
		// same jobs.
		"wait_seconds": 2, "poll_id": uuid(),
	}
}

// work runs one job and sends its heartbeats. When graceOver is closed, it releases the job. It
// returns the jobs that come with the answer to its ack.
func work(j job, stopping context.Context, graceOver <-chan struct{}) []job {
	fence := func() object {
		return object{"job_id": j.ID, "worker_id": name, "attempt": j.Attempt, "lease_id": j.LeaseID}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	// The reason for the stop, if the job was stopped.
	stopped := make(chan error, 1)
	stop := func(why error) {
		select {
		case stopped <- why:
			cancel()
		default:
		}
	}
	go func() {
		ticker := time.NewTicker(time.Duration(j.Beat) * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-graceOver:
				stop(errReleased)
				return
			case <-ticker.C:
				var reply struct{ Status string }
				if err := call("heartbeat", fence(), &reply); err != nil {
					stop(errLost) // 409: this worker no longer holds the job
				} else if reply.Status == "cancel" {
					stop(errCancelled)
				}
			}
		}
	}()
	result, err := handle(ctx, j)
	if err != nil {
		select {
		case err = <-stopped:
		default:
		}
	}
	ack := fence()
	switch {
	case errors.Is(err, errLost):
		return nil
	case errors.Is(err, errReleased):
		ack["status"] = "released"
	case err != nil:
		ack["status"] = "failed"
		ack["error"] = object{"type": "error", "message": err.Error()}
	default:
		ack["status"], ack["result"] = "succeeded", result
	}
	cancel() // no more heartbeats
	if stopping.Err() == nil {
		ack["then_poll"] = wanted()
	}
	var reply struct{ Poll struct{ Jobs []job } }
	if err := call("ack", ack, &reply); err != nil {
		fmt.Println(j.ID, err) // 409: this worker no longer holds the job
	}
	return reply.Poll.Jobs
}

func main() {
	stopping, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	graceOver := make(chan struct{})
	go func() {
		<-stopping.Done()
		time.Sleep(grace)
		close(graceOver)
	}()
	beatSeconds := 5
	if lease/3 > beatSeconds {
		beatSeconds = lease / 3
	}
	registration := object{
		"worker_id": name, "queues": []string{"default"}, "job_types": []string{"greet"},
		"concurrency": 1,
		// After three times that without a call its job returns, without a failure.
		"beat_seconds": beatSeconds,
	}
	if err := call("register", registration, &object{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("ready")
	var jobs []job
	for len(jobs) > 0 || stopping.Err() == nil {
		if len(jobs) > 0 {
			jobs = append(jobs[1:], work(jobs[0], stopping, graceOver)...)
			continue
		}
		poll := wanted()
		poll["worker_id"] = name
		var reply struct{ Jobs []job }
		if err := call("poll", poll, &reply); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		jobs = reply.Jobs
	}
	if err := call("deregister", object{"worker_id": name}, &object{}); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}
