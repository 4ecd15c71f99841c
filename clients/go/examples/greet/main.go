// A worker that greets, and a producer: `greet`, `greet enqueue 10`.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"fencepost.example/fencepost"
)

func number(name string, otherwise int) int {
	if number, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return number
	}
	return otherwise
}

func inSteps(ctx context.Context, job *fencepost.Job, steps, hangsAt int) (any, error) {
	ran, sum := []int{}, 0
	for number := 1; number <= steps; number++ {
		square, err := fencepost.Step(ctx, job, fmt.Sprintf("square %d", number), func() (int, error) {
			if number == hangsAt && job.Attempt == 1 {
				time.Sleep(time.Minute)
			}
			ran = append(ran, number)
			return number * number, nil
		})
		if err != nil {
			return nil, err
		}
		sum += square
	}
	return map[string]any{"ran": ran, "sum": sum}, nil
}

func greet(ctx context.Context, job *fencepost.Job) (any, error) {
	payload := struct {
		Name         string
		Fail         bool
		SleepSeconds int `json:"sleep_seconds"`
		Later        int
		Steps        int
		HangsAt      int `json:"hangs_at"`
		Children     int
		FailsFirst   bool `json:"fails_first"`
	}{Name: "world"}
	if err := json.Unmarshal(job.Payload, &payload); err != nil {
		return nil, fencepost.NotRetryable{Err: err}
	}
	if payload.Steps > 0 {
		return inSteps(ctx, job, payload.Steps, payload.HangsAt)
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(time.Duration(payload.SleepSeconds) * time.Second):
	}
	for n := 0; n < payload.Children; n++ {
		if _, err := client.Enqueue(ctx, "child", fencepost.Fields{"of": "greet"}, nil); err != nil {
			return nil, err
		}
	}
	if payload.Later > 0 && job.Attempt == 1 {
		return nil, fencepost.Snooze{For: time.Duration(payload.Later) * time.Second}
	}
	if payload.Fail || payload.FailsFirst && job.Attempt == 1 {
		return nil, errors.New("asked to fail")
	}
	return map[string]string{"greeting": "Hello, " + payload.Name + "!"}, nil
}

// many enqueues this number of jobs at once, and counts all of them, page by page.
func many(number string) {
	ctx, count, jobs := context.Background(), 0, []fencepost.Fields{}
	for wanted, _ := strconv.Atoi(number); len(jobs) < wanted; {
		jobs = append(jobs, fencepost.Fields{"job_type": "many"})
	}
	stored, err := client.EnqueueMany(ctx, jobs)
	if err == nil {
		err = client.Items(ctx, "/v1/jobs?q=type:many&limit=2", func(json.RawMessage) error {
			count++
			return nil
		})
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(stored), count)
}

var client *fencepost.Client

func main() {
	var err error
	if client, err = fencepost.NewClient("", ""); err != nil {
		log.Fatal(err)
	}
	if len(os.Args) == 3 && os.Args[1] == "enqueue" {
		count, _ := strconv.Atoi(os.Args[2])
		fields := fencepost.Fields{}
		if seconds := number("RETRY_SECONDS", 0); seconds > 0 {
			fields["retry_for"] = time.Duration(seconds) * time.Second
		}
		for i := 0; i < count; i++ {
			payload := fencepost.Fields{"name": fmt.Sprintf("number %d", i)}
			if _, err := client.Enqueue(context.Background(), "greet", payload, fields); err != nil {
				log.Fatal(err)
			}
		}
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "many" {
		many(os.Args[2])
		return
	}
	worker := fencepost.NewWorker(client)
	worker.Concurrency = number("CONCURRENCY", 1)
	worker.Lease = time.Duration(number("FENCEPOST_LEASE_SECONDS", 30)) * time.Second
	worker.OnReady = func() { fmt.Println("ready") }
	worker.Job("greet", greet)
	if err := worker.Run(); err != nil {
		log.Fatal(err)
	}
}
