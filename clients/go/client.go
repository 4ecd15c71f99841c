// Package fencepost is the client and worker for Fencepost, a job queue with an HTTP API.
package fencepost

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	mathrand "math/rand"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// A request without an answer after this time has failed.
	timeout = 15 * time.Second
	// Longest wait of one request: the server's limit.
	maxWait = 30 * time.Second
	// The pause before the first retry; it doubles up to maxPause.
	firstPause = 250 * time.Millisecond
	maxPause   = 10 * time.Second
	// How long a request is retried.
	retryTime = time.Minute
	// A Retry-After beyond this is cut.
	maxRetryAfter = time.Minute
)

// Fields is an object of JSON.
type Fields map[string]any

// APIError says why the server refused a request.
type APIError struct {
	// Status of the answer.
	Status int `json:"-"`
	// Code is stable; later servers may send codes that this package does not name.
	Code      ErrorCode `json:"code"`
	Message   string    `json:"message"`
	RequestID string    `json:"request_id"`
	// Details has the invalid fields.
	Details []struct {
		Field   string `json:"field"`
		Message string `json:"message"`
	} `json:"details"`
	JobState      string `json:"job_state"`
	ExistingJobID string `json:"existing_job_id"`
}

func (e *APIError) Error() string {
	return fmt.Sprintf("%s (%s, request %s)", e.Message, e.Code, e.RequestID)
}

// IsRetryable reports whether the same request may succeed later.
func (e *APIError) IsRetryable() bool {
	return e.Status >= 500 || e.Status == http.StatusRequestTimeout ||
		e.Status == http.StatusTooManyRequests || e.Code == "idempotency_in_progress"
}

// IsNoRoom reports whether a queue is full, or a quota is used up.
func (e *APIError) IsNoRoom() bool {
	return e.Code == CodeQueueFull || e.Code == CodeQuotaExceeded
}

// refuses reports whether the request was invalid because of this field.
func (e *APIError) refuses(field string) bool {
	for _, detail := range e.Details {
		if detail.Field == field {
			return e.Status == http.StatusBadRequest
		}
	}
	return false
}

type traceKey struct{}
type jobKey struct{}

// newKey is the idempotency key of a request that enqueues this: in a handler one of its job, so that
// another attempt that enqueues the same makes no second job.
func newKey(ctx context.Context, body any) string {
	if job, ok := ctx.Value(jobKey{}).(*Job); ok {
		if content, err := json.Marshal(body); err == nil {
			return job.childKey(content)
		}
	}
	return randomID()
}

const projectHeader = "Fencepost-Project"

// Client enqueues jobs and reads them. Goroutines may share it.
type Client struct {
	url string
	// A function, so that no log shows the key.
	key  func() string
	http *http.Client
	// As the server named it: a proxy can keep the requests of a project on one node.
	project *atomic.Value
}

// NewClient returns a client; empty arguments stand for FENCEPOST_URL and FENCEPOST_KEY.
func NewClient(url, key string) (*Client, error) {
	if url == "" {
		url = os.Getenv("FENCEPOST_URL")
	}
	if url == "" {
		url = "http://127.0.0.1:7070"
	}
	if key == "" {
		key = os.Getenv("FENCEPOST_KEY")
	}
	// A secret that was read from a file ends with a line feed.
	key = strings.TrimSpace(key)
	if key == "" {
		return nil, errors.New("an API key is needed: the argument, or FENCEPOST_KEY")
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = MaxConcurrency
	// A redirect would turn a POST into a GET.
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	client := &http.Client{Transport: transport, CheckRedirect: stay}
	url = strings.TrimRight(url, "/")
	return &Client{url, func() string { return key }, client, &atomic.Value{}}, nil
}

// call is one request with its retries.
type call struct {
	method, path string
	body         any
	headers      map[string]string
	// How long the server may wait before it answers.
	wait time.Duration
	// How long one try may take beside the wait; 0: 15 s.
	timeout time.Duration
	// How long it is retried.
	retry time.Duration
	// A full queue or a used-up quota is retried, too.
	waitsForRoom bool
}

// Request is any call of the API, such as Request(ctx, "GET", "/v1/queues", nil, &queues). It
// retries what may pass: the network, 408, 429 and 5xx; a full queue or a used-up quota is returned at
// once. A POST is sent with an idempotency key, so that what is sent again is done once.
func (c *Client) Request(ctx context.Context, method, path string, body, answer any) error {
	return c.send(ctx, call{method: method, path: path, body: body, retry: retryTime}, answer)
}

// RequestWith is the same with headers, such as {"If-Match": queue.ETag} for a conditional write.
func (c *Client) RequestWith(
	ctx context.Context, method, path string, headers map[string]string, body, answer any,
) error {
	it := call{method: method, path: path, headers: headers, body: body, retry: retryTime}
	return c.send(ctx, it, answer)
}

func (c *Client) send(ctx context.Context, it call, answer any) error {
	var content []byte
	if it.body != nil {
		var err error
		if content, err = json.Marshal(it.body); err != nil {
			return err
		}
	}
	if it.method == "POST" && !strings.HasPrefix(it.path, "/v1/workers/") {
		headers := map[string]string{"Idempotency-Key": randomID()}
		for name, value := range it.headers {
			headers[name] = value
		}
		it.headers = headers
	}
	if it.timeout == 0 {
		it.timeout = timeout
	}
	it.waitsForRoom = it.waitsForRoom || strings.HasPrefix(it.path, "/v1/workers/")
	deadline := time.Now().Add(it.retry)
	for pause := firstPause; ; pause *= 2 {
		after, err := c.try(ctx, it, content, answer)
		var refused *APIError
		if err == nil || errors.As(err, &refused) && !refused.IsRetryable() {
			return err
		}
		if refused != nil && refused.IsNoRoom() && !it.waitsForRoom {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if pause == firstPause && it.retry > 0 {
			log.Printf("fencepost: a request to %s failed: %v; trying again", c.url, err)
		}
		if pause > maxPause {
			pause = maxPause
		}
		// Half of it by chance, so that clients do not come back together.
		wait := pause/2 + time.Duration(mathrand.Int63n(int64(pause/2)))
		if after > maxRetryAfter {
			after = maxRetryAfter
		}
		if after > wait {
			wait = after
		}
		if time.Now().Add(wait).After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

func (c *Client) try(ctx context.Context, it call, content []byte, answer any) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, it.timeout+it.wait)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, it.method, c.url+it.path, bytes.NewReader(content))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Authorization", "Bearer "+c.key())
	request.Header.Set("Content-Type", "application/json")
	if project, isKnown := c.project.Load().(string); isKnown {
		request.Header.Set(projectHeader, project)
	}
	for name, value := range it.headers {
		request.Header.Set(name, value)
	}
	reply, err := c.http.Do(request)
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	if project := reply.Header.Get(projectHeader); project != "" {
		c.project.Store(project)
	}
	text, err := io.ReadAll(reply.Body)
	if err != nil {
		return 0, err
	}
	if reply.StatusCode < 300 {
		if answer == nil || len(text) == 0 {
			return 0, nil
		}
		return 0, json.Unmarshal(text, answer)
	}
	after := retryAfter(reply.Header.Get("Retry-After"), time.Now())
	refused := struct {
		Error APIError `json:"error"`
	}{APIError{Message: reply.Status}}
	// What is between may answer in its own words.
	_ = json.Unmarshal(text, &refused)
	refused.Error.Status = reply.StatusCode
	return after, &refused.Error
}

// The pause that a Retry-After asks for: seconds, or until a date, as a proxy may send it.
func retryAfter(value string, now time.Time) time.Duration {
	if seconds, err := strconv.Atoi(value); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil && at.After(now) {
		return at.Sub(now)
	}
	return 0
}

// JobRecord is a job as the server has it.
type JobRecord struct {
	ID       string          `json:"id"`
	JobType  string          `json:"job_type"`
	Queue    string          `json:"queue"`
	State    string          `json:"state"`
	Attempt  int             `json:"attempt"`
	Failures int             `json:"failures"`
	Result   json.RawMessage `json:"result"`
}

// HasEnded reports whether it has succeeded, is a dead letter or was cancelled.
func (j *JobRecord) HasEnded() bool {
	return j.State == "succeeded" || j.State == "dead_letter" || j.State == "cancelled"
}

// Enqueue stores a job once, however often the request must be sent. The fields are the others of
// POST /v1/jobs, such as queue, delay_seconds and max_attempts; `idempotency_key` replaces the key
// that each call makes. A full queue is returned at once, see [APIError.IsNoRoom]; a time.Duration
// as `retry_for` waits for room, and bounds all retries. With the context of a handler, another attempt
// that enqueues the same stores no second job.
func (c *Client) Enqueue(ctx context.Context, jobType string, payload any, fields Fields) (*JobRecord, error) {
	body := Fields{"job_type": jobType, "payload": payload}
	headers := map[string]string{}
	it := call{method: "POST", path: "/v1/jobs", body: body, headers: headers, retry: retryTime}
	for name, value := range fields {
		switch name {
		case "idempotency_key":
			headers["Idempotency-Key"] = fmt.Sprint(value)
		case "retry_for":
			if it.retry, it.waitsForRoom = value.(time.Duration); !it.waitsForRoom {
				return nil, fmt.Errorf("retry_for must be a time.Duration, is %T", value)
			}
		default:
			body[name] = value
		}
	}
	if headers["Idempotency-Key"] == "" {
		headers["Idempotency-Key"] = newKey(ctx, body)
	}
	if trace, ok := ctx.Value(traceKey{}).(string); ok && trace != "" {
		headers["traceparent"] = trace
	}
	job := &JobRecord{}
	return job, c.send(ctx, it, job)
}

// EnqueueMany stores all of these jobs, or none. Each has job_type, payload and the other fields of
// POST /v1/jobs.
func (c *Client) EnqueueMany(ctx context.Context, jobs []Fields) ([]*JobRecord, error) {
	body := Fields{"jobs": jobs}
	headers := map[string]string{"Idempotency-Key": newKey(ctx, body)}
	var answer struct{ Jobs []*JobRecord }
	err := c.RequestWith(ctx, "POST", "/v1/jobs/batch", headers, body, &answer)
	return answer.Jobs, err
}

// Items calls each with all items of a list, page by page, until it returns an error:
// Items(ctx, "/v1/jobs?q=state:pending", each).
func (c *Client) Items(ctx context.Context, path string, each func(json.RawMessage) error) error {
	begins := "?"
	if strings.Contains(path, "?") {
		begins = "&"
	}
	for at := ""; ; {
		page := map[string]json.RawMessage{}
		if err := c.Request(ctx, "GET", path+at, nil, &page); err != nil {
			return err
		}
		var cursor string
		_ = json.Unmarshal(page["next_cursor"], &cursor)
		for _, value := range page {
			var items []json.RawMessage
			if json.Unmarshal(value, &items) != nil {
				continue
			}
			for _, item := range items {
				if err := each(item); err != nil {
					return err
				}
			}
		}
		if cursor == "" {
			return nil
		}
		at = begins + "cursor=" + url.QueryEscape(cursor)
	}
}

// Job returns the job as it is now.
func (c *Client) Job(ctx context.Context, id string) (*JobRecord, error) {
	job := &JobRecord{}
	return job, c.Request(ctx, "GET", "/v1/jobs/"+url.PathEscape(id), nil, job)
}

// Wait returns the job when it has ended, or when the context is done.
func (c *Client) Wait(ctx context.Context, id string) (*JobRecord, error) {
	path := fmt.Sprintf("/v1/jobs/%s?wait_seconds=%d", url.PathEscape(id), int(maxWait.Seconds()))
	for {
		job := &JobRecord{}
		err := c.send(ctx, call{method: "GET", path: path, wait: maxWait, retry: retryTime}, job)
		if err != nil || job.HasEnded() {
			return job, err
		}
	}
}

// Cancel cancels a job; a running one is asked to stop.
func (c *Client) Cancel(ctx context.Context, id string) error {
	return c.Request(ctx, "POST", "/v1/jobs/"+url.PathEscape(id)+"/cancel", Fields{}, nil)
}

// randomID is a UUIDv7: ids in the order of time keep the server's index small.
func randomID() string {
	var id [16]byte
	_, _ = rand.Read(id[:])
	now := time.Now().UnixMilli()
	for i := 0; i < 6; i++ {
		id[i] = byte(now >> (40 - 8*i))
	}
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}
