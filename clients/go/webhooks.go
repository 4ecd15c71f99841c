package fencepost

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// WebhookTolerance is how much the clocks of two machines may differ, and how old a webhook may be.
const WebhookTolerance = 5 * time.Minute

// A shorter secret is none: as when the variable that should hold it is empty.
const minSecretBytes = 24

// ErrInvalidWebhook says that a request was not signed with the secret, or is too old.
var ErrInvalidWebhook = errors.New("invalid webhook")

// WebhookEvent is an event as it is sent to an endpoint.
type WebhookEvent struct {
	// Type is such as "job.dead_lettered". Others come later: ignore those that you do not know.
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"`
	// Data is what the event is about.
	Data json.RawMessage `json:"data"`
}

// VerifyWebhook checks that a request comes from the server, and returns its event. The secret is
// the endpoint's, "whsec_…"; the body is as it came.
func VerifyWebhook(secret string, header http.Header, body []byte) (*WebhookEvent, error) {
	id, timestamp := header.Get("webhook-id"), header.Get("webhook-timestamp")
	seconds, err := strconv.ParseInt(timestamp, 10, 64)
	if err != nil || id == "" {
		return nil, fmt.Errorf("%w: no signed webhook", ErrInvalidWebhook)
	}
	age := time.Since(time.Unix(seconds, 0))
	if age > WebhookTolerance || age < -WebhookTolerance {
		return nil, fmt.Errorf("%w: it is too old, or the clocks differ", ErrInvalidWebhook)
	}
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil || len(key) < minSecretBytes {
		return nil, fmt.Errorf("%w: the secret is not one", ErrInvalidWebhook)
	}
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(id + "." + timestamp + "."))
	mac.Write(body)
	made := mac.Sum(nil)
	for _, signature := range strings.Fields(header.Get("webhook-signature")) {
		sent, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(signature, "v1,"))
		if err == nil && hmac.Equal(sent, made) {
			event := new(WebhookEvent)
			return event, json.Unmarshal(body, event)
		}
	}
	return nil, fmt.Errorf("%w: no signature is made with this secret", ErrInvalidWebhook)
}
