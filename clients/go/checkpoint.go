package fencepost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
)

// ErrNotSaved says that a checkpoint was not stored: the project is full, or a later one is there.
var ErrNotSaved = errors.New("the checkpoint was not stored")

// Save stores how far the job has come, for the next attempt: it finds it in Checkpoint. It is JSON
// of at most 64 KiB.
func (j *Job) Save(ctx context.Context, checkpoint any) error {
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
	if errors.As(err, &refused) && refused.Status == http.StatusConflict {
		j.end(ErrCancelled, true)
		return ErrCancelled
	}
	if err != nil {
		return err
	}
	if answer.Status == "cancel" {
		j.end(ErrCancelled, false)
	}
	switch answer.Checkpoint {
	case "":
		log.Print("fencepost: the server is too old for checkpoints")
	case "stored":
	default:
		return fmt.Errorf("%w: it is %s", ErrNotSaved, answer.Checkpoint)
	}
	j.Checkpoint = data
	return nil
}

// Step runs work if no attempt has done so, and returns its result: the checkpoint has it.
func Step[T any](ctx context.Context, j *Job, name string, work func() (T, error)) (T, error) {
	var result T
	before, steps := map[string]json.RawMessage{}, map[string]json.RawMessage{}
	if len(j.Checkpoint) > 0 {
		if err := json.Unmarshal(j.Checkpoint, &before); err != nil {
			return result, fmt.Errorf("the checkpoint of a job with steps must be an object: %w", err)
		}
	}
	if done, ok := before["steps"]; ok {
		if err := json.Unmarshal(done, &steps); err != nil {
			return result, err
		}
	}
	if done, ok := steps[name]; ok {
		return result, json.Unmarshal(done, &result)
	}
	if ctx.Err() != nil {
		return result, ctx.Err()
	}
	result, err := work()
	if err != nil {
		return result, err
	}
	if steps[name], err = json.Marshal(result); err != nil {
		return result, err
	}
	if before["steps"], err = json.Marshal(steps); err != nil {
		return result, err
	}
	return result, j.Save(ctx, before)
}
