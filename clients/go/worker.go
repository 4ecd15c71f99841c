package fencepost

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// How long a poll waits: shorter than the 30 s after which a silent worker counts as lost.
	pollWait = 20 * time.Second
	// Jobs that one poll asks for at most: the server's limit.
	maxCapacity = 50
	// Between two heartbeats at most.
	beatTime = 5 * time.Second
	// The longest time between two calls while jobs run, as the worker registers it, in seconds.
	// After three times that without a call its jobs return.
	maxCallSeconds = 10
	// The length of leases: heartbeats renew them.
	leaseTime = 30 * time.Second
	// Heartbeats that may fail before a lease ends.
	beatsALease = 3
	// How long an ack is sent again while the server does not answer.
	ackRetry = 10 * time.Minute
	// What handlers may still take after the grace period.
	lastTime = 2 * time.Second
	// How long the last call may take.
	deregisterTime = 3 * time.Second
	// Longest pause that a handler may choose, in seconds: the server's limit.
	maxRetryPauseSeconds = 30 * 86400
	// The same for RateLimited.
	maxRateLimitedSeconds = 86400
	// One chunk of logs, in bytes: the server's limit is 64 KiB.
	maxLogBytes = 60 * 1024
	// MaxConcurrency is how many handlers one worker runs at the same time at most.
	MaxConcurrency = 100
)

var (
	// ErrCancelled is the cause when a job was cancelled, or its lease is lost.
	ErrCancelled = errors.New("the job was cancelled, or its lease is lost")
	// ErrReleased returns a job to its queue without a failure.
	ErrReleased = errors.New("the worker stops")
)

// Snooze puts the job off: it is ready again after that time. No failure is counted.
type Snooze struct{ For time.Duration }

func (e Snooze) Error() string { return fmt.Sprintf("put off for %s", e.For) }

// NotRetryable wraps an error of a job that cannot succeed: it becomes a dead letter at once.
type NotRetryable struct{ Err error }

func (e NotRetryable) Error() string { return e.Err.Error() }
func (e NotRetryable) Unwrap() error { return e.Err }

// RetryAfter wraps an error and chooses when the job is retried.
type RetryAfter struct {
	Err   error
	After time.Duration
}

func (e RetryAfter) Error() string { return e.Err.Error() }
func (e RetryAfter) Unwrap() error { return e.Err }

// RateLimited says that what the job calls asks for fewer requests: its group waits for this time,
// or its queue if the job has no group or Scope is "queue". With "shared_limit:NAME" all wait that
// this limit counts. No failure is counted.
type RateLimited struct {
	After time.Duration
	Scope string
}

func (e RateLimited) Error() string { return fmt.Sprintf("asked to wait %s", e.After) }

// Job is a leased job.
type Job struct {
	ID      string          `json:"id"`
	JobType string          `json:"job_type"`
	Payload json.RawMessage `json:"payload"`
	// Attempt is the fence: show it to other systems, so that they can refuse an older attempt.
	Attempt       int               `json:"attempt"`
	LeaseID       string            `json:"lease_id"`
	Tags          map[string]string `json:"tags"`
	ParentResults []json.RawMessage `json:"parent_results"`
	Traceparent   string            `json:"traceparent"`
	LeaseSeconds  int               `json:"lease_seconds"`
	// TimeoutSeconds is how long an attempt may take.
	TimeoutSeconds int `json:"timeout_seconds"`
	// Checkpoint is how far earlier attempts have come, as Save stored it. Empty: nowhere.
	Checkpoint         json.RawMessage `json:"checkpoint"`
	CheckpointSequence int64           `json:"checkpoint_sequence"`

	worker *Worker
	stop   context.CancelFunc
	mutex  sync.Mutex
	why    error
	isLost bool
	// Its handler has ended.
	done     atomic.Bool
	begun    time.Time
	renewed  time.Time
	progress *float64
	// The number of the last checkpoint that was stored: where another attempt begins.
	stored int64
	// How often this attempt has enqueued the same since then.
	children map[string]int
	// One checkpoint is stored after the other.
	saving   sync.Mutex
	sequence int
}

// Progress reports how much is done, from 0 to 1.
func (j *Job) Progress(part float64) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	j.progress = &part
}

// Log adds a line to the job's logs.
func (j *Job) Log(ctx context.Context, text string) error {
	j.mutex.Lock()
	sequence := j.sequence
	j.sequence++
	j.mutex.Unlock()
	if len(text) > maxLogBytes {
		text = strings.ToValidUTF8(text[:maxLogBytes], "")
	}
	chunk := Fields{"job_id": j.ID, "attempt": j.Attempt, "sequence": sequence, "data": text + "\n",
		"timestamp_ms": time.Now().UnixMilli()}
	body := Fields{"worker_id": j.worker.ID, "chunks": []Fields{chunk}}
	return j.worker.client.Request(ctx, "POST", "/v1/workers/logs", body, nil)
}

// childKey is the idempotency key of what the handler enqueues next: the same in each attempt that begins
// at the same checkpoint.
func (j *Job) childKey(content []byte) string {
	digest := sha256.Sum256(content)
	j.mutex.Lock()
	defer j.mutex.Unlock()
	place := fmt.Sprintf("%s:%d:%x", j.ID, j.stored, digest[:16])
	if j.children == nil {
		j.children = map[string]int{}
	}
	j.children[place]++
	return fmt.Sprintf("%s:%d", place, j.children[place])
}

func (j *Job) fence() Fields {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	fence := Fields{"job_id": j.ID, "attempt": j.Attempt, "lease_id": j.LeaseID}
	if j.progress != nil {
		fence["progress"] = *j.progress
	}
	return fence
}

func (j *Job) lost() bool {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	return j.isLost
}

// fate says why the job was lost, as far as the worker knows.
func (j *Job) fate() string {
	if limit := time.Duration(j.TimeoutSeconds) * time.Second; time.Since(j.begun) >= limit {
		return fmt.Sprintf("has outlived its timeout of %v", limit)
	}
	return "has lost its lease"
}

// renew notes when the lease was renewed.
func (j *Job) renew(at time.Time) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	j.renewed = at
}

// overdue reports whether the lease was not renewed for its whole length: another worker may have the
// job.
func (j *Job) overdue() bool {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	return time.Since(j.renewed) > time.Duration(j.LeaseSeconds)*time.Second
}

// end stops its handler.
func (j *Job) end(why error, isLost bool) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	if j.why == nil {
		j.why = why
	}
	j.isLost = j.isLost || isLost
	j.stop()
}

// Handler works on a job. What it returns is the job's result. The context ends when the job must
// stop.
type Handler func(ctx context.Context, job *Job) (any, error)

// Worker runs handlers for the jobs of some queues.
type Worker struct {
	// ID is the worker's name: no two processes have the same.
	ID string
	// Queues to poll; default: `default`.
	Queues []string
	// Concurrency is how many handlers run at the same time; default: 10.
	Concurrency int
	Labels      []string
	// Lease is how soon the jobs of a worker that has died are run again; default: 30 s.
	Lease time.Duration
	// Grace is what running jobs have to end after SIGTERM; default: 25 s.
	Grace time.Duration
	// OnReady is called when the worker has registered.
	OnReady func()

	client   *Client
	handlers map[string]Handler
	mutex    sync.Mutex
	active   map[string]*Job
	quiet    map[string]bool
	parked   context.Context
	unpark   context.CancelFunc
	changed  chan struct{}
	ending   context.Context
	finish   context.CancelFunc
	// Slots without a job.
	idle atomic.Int32
	// Held by the slot that polls for all of them; it guards the rest.
	asking     sync.Mutex
	given      []*Job
	unanswered Fields
}

// NewWorker returns a worker without handlers.
func NewWorker(client *Client) *Worker {
	host, _ := os.Hostname()
	w := &Worker{
		ID:     fmt.Sprintf("%s-%d-%s", host, os.Getpid(), randomID()[24:]),
		Queues: []string{"default"}, Concurrency: 10, Lease: leaseTime,
		Grace:  25 * time.Second,
		client: client, handlers: map[string]Handler{}, active: map[string]*Job{},
		quiet: map[string]bool{}, changed: make(chan struct{}), OnReady: func() {},
	}
	w.ending, w.finish = context.WithCancel(context.Background())
	w.parked, w.unpark = context.WithCancel(w.ending)
	return w
}

// Job makes a function the handler of a job type.
func (w *Worker) Job(jobType string, handler Handler) { w.handlers[jobType] = handler }

// Stop takes no more jobs, and lets Run return when those that run have ended.
func (w *Worker) Stop() { w.finish() }

// rest stops or resumes polls, for one of two reasons: a signal, or a directive of the server.
func (w *Worker) rest(reason string, isQuiet bool) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if w.quiet[reason] == isQuiet {
		return
	}
	w.quiet[reason] = isQuiet
	if w.unpark(); !w.quiet["signal"] && !w.quiet["directive"] {
		w.parked, w.unpark = context.WithCancel(w.ending)
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// park returns the context of parked polls, and the signal of its next change.
func (w *Worker) park() (context.Context, chan struct{}) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.parked, w.changed
}

func (w *Worker) obey(state string) {
	switch state {
	case "terminate":
		w.Stop()
	case "quiet", "running":
		w.mutex.Lock()
		isSuspended := w.quiet["signal"]
		w.mutex.Unlock()
		if !isSuspended {
			w.rest("directive", state == "quiet")
		}
	}
}

// Run works until SIGTERM, SIGINT or Stop. Running jobs have Grace to end.
func (w *Worker) Run() error {
	if w.Concurrency < 1 || w.Concurrency > MaxConcurrency {
		return fmt.Errorf("concurrency must be between 1 and %d", MaxConcurrency)
	}
	if len(w.handlers) == 0 {
		return errors.New("the worker has no handlers: it would take jobs of every type")
	}
	host, _ := os.Hostname()
	about := w.wanted(Fields{"worker_id": w.ID, "hostname": host, "pid": os.Getpid(),
		"sdk_version": "fencepost-go/0.2.0", "concurrency": w.Concurrency})
	if err := w.register(about); err != nil {
		return err
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGTSTP, syscall.SIGCONT)
	defer signal.Stop(signals)
	go w.listen(signals)
	done := make(chan struct{})
	go w.beat(done)
	failures := make(chan error, w.Concurrency)
	for i := 0; i < w.Concurrency; i++ {
		go func() { failures <- w.serve() }()
	}
	w.OnReady()
	err, left := w.drain(failures)
	close(done)
	if left > 0 {
		log.Printf("fencepost: %d handlers did not stop: their jobs are released", left)
	}
	// It releases what still runs.
	it := call{method: "POST", path: "/v1/workers/deregister", body: Fields{"worker_id": w.ID},
		timeout: deregisterTime, retry: deregisterTime}
	if refused := w.client.send(context.Background(), it, nil); refused != nil { // its leases expire instead
		log.Printf("fencepost: the worker was not deregistered: %v", refused)
	}
	return err
}

func (w *Worker) register(about Fields) error {
	const path = "/v1/workers/register"
	about["beat_seconds"] = maxCallSeconds
	err := w.client.Request(context.Background(), "POST", path, about, nil)
	var refused *APIError
	if !errors.As(err, &refused) || !refused.refuses("beat_seconds") {
		return err
	}
	// A server of version 0.2.0 or older: a lost worker's jobs wait for their leases.
	delete(about, "beat_seconds")
	return w.client.Request(context.Background(), "POST", path, about, nil)
}

// drain waits for the slots: while the worker works, then for the grace period, then a little more.
func (w *Worker) drain(failures chan error) (first error, left int) {
	left = w.Concurrency
	var grace, last <-chan time.Time
	ending := w.ending.Done()
	for left > 0 {
		select {
		case err := <-failures:
			left--
			if err != nil && first == nil {
				first = err
				w.Stop()
			}
		case <-ending:
			ending, grace = nil, time.After(w.Grace)
		case <-grace:
			grace, last = nil, time.After(lastTime)
			for _, job := range w.running() {
				job.end(ErrReleased, false)
			}
		case <-last:
			return first, left
		}
	}
	return first, left
}

func (w *Worker) listen(signals chan os.Signal) {
	for it := range signals {
		switch it {
		case syscall.SIGTSTP:
			w.rest("signal", true)
		case syscall.SIGCONT:
			w.rest("signal", false)
		default:
			if w.ending.Err() != nil { // the second signal
				os.Exit(1)
			}
			w.Stop()
		}
	}
}

func (w *Worker) running() []*Job {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	jobs := make([]*Job, 0, len(w.active))
	for _, job := range w.active {
		jobs = append(jobs, job)
	}
	return jobs
}

func (w *Worker) beat(done chan struct{}) {
	pause := beatTime
	if w.Lease > 0 && w.Lease/beatsALease < pause {
		pause = w.Lease / beatsALease
	}
	for {
		select {
		case <-done:
			return
		case <-time.After(pause):
		}
		jobs := map[string]*Job{}
		active := []Fields{}
		for _, job := range w.running() {
			if job.lost() {
				continue
			}
			jobs[job.ID] = job
			active = append(active, job.fence())
		}
		w.mutex.Lock()
		state, isPolling := "running", !w.quiet["signal"] && !w.quiet["directive"]
		if w.quiet["signal"] {
			state = "quiet"
		}
		w.mutex.Unlock()
		if len(jobs) == 0 && isPolling { // the polls show that the worker lives
			continue
		}
		var answer struct {
			State string
			Jobs  []struct {
				JobID  string `json:"job_id"`
				Status string
			}
		}
		body := Fields{"worker_id": w.ID, "state": state, "active_jobs": active}
		// One that hangs must not take the time of the next ones.
		it := call{method: "POST", path: "/v1/workers/heartbeat", body: body, timeout: pause}
		begun := time.Now()
		if err := w.client.send(context.Background(), it, &answer); err != nil {
			log.Printf("fencepost: a heartbeat failed: %v", err)
		}
		for _, it := range answer.Jobs {
			if job := jobs[it.JobID]; job != nil {
				job.renew(begun)
				if it.Status == "lost" && !job.done.Load() { // else its ack is on the way
					log.Printf("fencepost: job %s %s: its outcome will not count", job.ID, job.fate())
				}
				if it.Status != "ok" {
					job.end(ErrCancelled, it.Status == "lost")
				}
			}
		}
		for _, job := range jobs {
			if job.overdue() {
				job.end(ErrCancelled, false)
			}
		}
		w.obey(answer.State)
	}
}

// wanted adds what jobs the worker takes.
func (w *Worker) wanted(fields Fields) Fields {
	types := []string{}
	for jobType := range w.handlers {
		types = append(types, jobType)
	}
	fields["queues"], fields["job_types"] = w.Queues, types
	if len(w.Labels) > 0 {
		fields["labels"] = w.Labels
	}
	return fields
}

func (w *Worker) poll(fields Fields, wait time.Duration) Fields {
	fields["wait_seconds"], fields["poll_id"] = int(wait.Seconds()), randomID()
	if w.Lease > 0 {
		fields["lease_seconds"] = int(w.Lease.Seconds())
	}
	return w.wanted(fields)
}

// given is the answer to a poll.
type given struct {
	Jobs  []*Job
	State string
}

func (w *Worker) serve() error {
	for {
		job, err := w.next()
		if job == nil {
			return err
		}
		for jobs := []*Job{job}; len(jobs) > 0; {
			jobs = append(w.work(jobs[0]), jobs[1:]...)
		}
	}
}

// next returns the next job of a slot; none: the worker stops. One poll asks for all idle slots.
func (w *Worker) next() (*Job, error) {
	w.idle.Add(1)
	w.asking.Lock()
	defer w.asking.Unlock()
	// Before the next slot asks, for itself and the others.
	defer w.idle.Add(-1)
	for len(w.given) == 0 {
		parked, changed := w.park()
		switch {
		case w.ending.Err() != nil:
			return nil, nil
		case parked.Err() != nil:
			select {
			case <-changed:
			case <-w.ending.Done():
			}
		default:
			if err := w.ask(parked); err != nil {
				return nil, err
			}
		}
	}
	job := w.given[0]
	w.given = w.given[1:]
	return job, nil
}

func (w *Worker) ask(parked context.Context) error {
	if w.unanswered == nil { // one without an answer is repeated with its id: it gets the same jobs
		w.unanswered = w.poll(Fields{"worker_id": w.ID}, pollWait)
		w.unanswered["capacity"] = math.Min(float64(w.idle.Load()), maxCapacity)
	}
	var answer given
	it := call{method: "POST", path: "/v1/workers/poll", body: w.unanswered, wait: pollWait, retry: retryTime}
	err := w.client.send(parked, it, &answer)
	var refused *APIError
	switch {
	case err == nil:
		w.unanswered, w.given = nil, answer.Jobs
		w.obey(answer.State)
	case parked.Err() != nil:
	case errors.As(err, &refused) && !refused.IsRetryable():
		return err
	default:
		log.Printf("fencepost: a poll failed: %v", err)
	}
	return nil
}

func (w *Worker) work(job *Job) []*Job {
	ctx := context.WithValue(context.Background(), traceKey{}, job.Traceparent)
	ctx, stop := context.WithCancel(context.WithValue(ctx, jobKey{}, job))
	defer stop()
	job.worker, job.stop, job.begun = w, stop, time.Now()
	job.renewed, job.stored = job.begun, job.CheckpointSequence
	w.mutex.Lock()
	earlier := w.active[job.ID]
	w.active[job.ID] = job
	w.mutex.Unlock()
	if earlier != nil { // this lease proves that the other one has ended
		earlier.end(ErrCancelled, true)
	}
	defer func() {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		if w.active[job.ID] == job {
			delete(w.active, job.ID)
		}
	}()
	begun := time.Now()
	end := w.handle(ctx, job)
	job.done.Store(true)
	end["duration_ms"] = time.Since(begun).Milliseconds()
	if job.lost() {
		return nil
	}
	next, err := w.ack(job, end)
	if err != nil { // 409: another attempt decides
		log.Printf("fencepost: the outcome of %s was not taken: %v", job.ID, err)
	}
	return next
}

// handle runs the handler, and returns the outcome. A panic is a failure.
func (w *Worker) handle(ctx context.Context, job *Job) (end Fields) {
	defer func() {
		if panicked := recover(); panicked != nil {
			end = failed(fmt.Errorf("panic: %v", panicked))
		}
	}()
	result, err := w.handlers[job.JobType](ctx, job)
	if err == nil {
		var content json.RawMessage
		if content, err = json.Marshal(result); err == nil {
			return Fields{"status": "succeeded", "result": content}
		}
		err = NotRetryable{fmt.Errorf("the result cannot be written as JSON: %w", err)}
	}
	isOverdue := job.overdue()
	job.mutex.Lock()
	defer job.mutex.Unlock()
	if errors.Is(err, context.Canceled) && job.why != nil {
		err = job.why
	}
	if errors.Is(err, ErrCancelled) && isOverdue {
		err = ErrReleased
	}
	return failed(err)
}

// retrySeconds is the pause in whole seconds that the server takes.
func retrySeconds(pause time.Duration) int {
	seconds := math.Ceil(pause.Seconds())
	return int(math.Min(math.Max(seconds, 0), maxRetryPauseSeconds))
}

func failed(err error) Fields {
	if errors.Is(err, ErrReleased) {
		return Fields{"status": "released"}
	}
	var snooze Snooze
	if errors.As(err, &snooze) {
		return Fields{"status": "released", "delay_seconds": retrySeconds(snooze.For)}
	}
	var limited RateLimited
	if errors.As(err, &limited) {
		seconds := math.Min(math.Max(math.Ceil(limited.After.Seconds()), 1), maxRateLimitedSeconds)
		end := Fields{"status": "rate_limited", "retry_after_seconds": int(seconds)}
		if limited.Scope != "" {
			end["scope"] = limited.Scope
		}
		return end
	}
	kind := err
	var final NotRetryable
	var later RetryAfter
	end := Fields{"status": "failed"}
	if errors.As(err, &final) {
		kind, end["retryable"] = final.Err, false
	} else if errors.As(err, &later) {
		kind, end["retry_after_seconds"] = later.Err, retrySeconds(later.After)
	}
	end["error"] = Fields{"type": fmt.Sprintf("%T", kind), "message": err.Error()}
	return end
}

func (w *Worker) ack(job *Job, end Fields) ([]*Job, error) {
	body := func(more Fields) Fields {
		body := Fields{"worker_id": w.ID, "job_id": job.ID, "attempt": job.Attempt, "lease_id": job.LeaseID}
		for _, fields := range []Fields{end, more} {
			for name, value := range fields {
				body[name] = value
			}
		}
		return body
	}
	it := call{method: "POST", path: "/v1/workers/ack", retry: ackRetry}
	if parked, _ := w.park(); parked.Err() == nil {
		var answer struct{ Poll given }
		if w.Concurrency == 1 { // else another slot polls for those that have no job
			it.wait = pollWait
		}
		it.body = body(Fields{"then_poll": w.poll(Fields{}, it.wait)})
		err := w.client.send(parked, it, &answer)
		var refused *APIError
		switch {
		case err == nil:
			w.obey(answer.Poll.State)
			return answer.Poll.Jobs, nil
		case errors.As(err, &refused) && (refused.Status == 400 || refused.Status == 413):
			report := Fields{"type": "ResultRefused", "message": err.Error()}
			// A handler that has done its work would not make its result smaller.
			isFinal := end["status"] == "succeeded" || end["retryable"] == false
			end = Fields{"status": "failed", "error": report, "retryable": !isFinal}
		case parked.Err() == nil:
			return nil, err
		}
		// It may have been recorded: an ack that shows its fence may be repeated.
	}
	it.body, it.wait = body(Fields{}), 0
	if w.ending.Err() != nil {
		it.retry = w.Grace
	}
	return nil, w.client.send(context.Background(), it, nil)
}
