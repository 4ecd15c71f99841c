package fencepost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"strings"
)

// ErrNotSaved says that a checkpoint was not stored: the project is full, or a later one is there.
var ErrNotSaved = errors.New("the checkpoint was not stored")

// Save stores how far the job has come, for the next attempt: it finds it in Checkpoint. It is JSON
// of at most 64 KiB.
func (j *Job) Save(ctx context.Context, checkpoint any) error {
	j.saving.Lock()
	defer j.saving.Unlock()
	return j.save(ctx, checkpoint)
}

func (j *Job) save(ctx context.Context, checkpoint any) error {
	data, err := json.Marshal(checkpoint)
	if err != nil {
		return err
	}
	j.mutex.Lock()
	j.CheckpointSequence++
	sequence := j.CheckpointSequence
	j.mutex.Unlock()
	body := j.fence()
	body["worker_id"], body["checkpoint"] = j.worker.ID, json.RawMessage(data)
	body["checkpoint_sequence"] = sequence
	var answer struct{ Status, Checkpoint string }
	err = j.worker.client.Request(ctx, "POST", "/v1/workers/heartbeat", body, &answer)
	var refused *APIError
	isRefused := errors.As(err, &refused)
	if isRefused && refused.Status == http.StatusConflict {
		j.end(ErrCancelled, true)
		return ErrCancelled
	}
	isOld := isRefused && refused.refuses("checkpoint") && strings.Contains(err.Error(), "unknown")
	if err != nil && !isOld {
		return err
	}
	if answer.Status == "cancel" {
		j.end(ErrCancelled, false)
	}
	switch answer.Checkpoint {
	case "": // version 0.2.0 or older
		log.Print("fencepost: the server is too old for checkpoints")
	case "stored":
	default:
		return fmt.Errorf("%w: it is %s", ErrNotSaved, answer.Checkpoint)
	}
	j.Checkpoint = data
	j.mutex.Lock()
	j.stored = sequence
	j.mutex.Unlock()
	return nil
}

// steps returns the checkpoint, and the results of the steps in it.
func (j *Job) steps() (all, steps map[string]json.RawMessage, err error) {
	if len(j.Checkpoint) > 0 {
		if err = json.Unmarshal(j.Checkpoint, &all); err != nil {
			return nil, nil, fmt.Errorf("the checkpoint of a job with steps must be an object: %w", err)
		}
	}
	if done, ok := all["steps"]; ok {
		if err = json.Unmarshal(done, &steps); err != nil {
			return nil, nil, err
		}
	}
	if all == nil {
		all = map[string]json.RawMessage{}
	}
	if steps == nil {
		steps = map[string]json.RawMessage{}
	}
	return all, steps, nil
}

// Step runs work if no attempt has done so, and returns its result: the checkpoint has it.
func Step[T any](ctx context.Context, j *Job, name string, work func() (T, error)) (T, error) {
	var result T
	j.saving.Lock()
	_, steps, err := j.steps()
	j.saving.Unlock()
	if err != nil {
		return result, err
	}
	if done, ok := steps[name]; ok {
		return result, json.Unmarshal(done, &result)
	}
	if ctx.Err() != nil {
		return result, ctx.Err()
	}
	if result, err = work(); err != nil {
		return result, err
	}
	j.saving.Lock()
	defer j.saving.Unlock()
	// Other steps may have ended meanwhile.
	all, steps, err := j.steps()
	if err != nil {
		return result, err
	}
	if steps[name], err = json.Marshal(result); err != nil {
		return result, err
	}
	if all["steps"], err = json.Marshal(steps); err != nil {
		return result, err
	}
	return result, j.save(ctx, all)
}
