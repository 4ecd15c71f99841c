package fencepost

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"net/http"
	"strconv"
	"testing"
	"time"
)

const testSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

func signedAt(at time.Time, body string) http.Header {
	key, _ := base64.StdEncoding.DecodeString(testSecret[len("whsec_"):])
	timestamp := strconv.FormatInt(at.Unix(), 10)
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte("evt_1." + timestamp + "." + body))
	header := http.Header{}
	header.Set("Webhook-Id", "evt_1")
	header.Set("Webhook-Timestamp", timestamp)
	// As while a secret is rotated: one signature of two is ours.
	header.Set("Webhook-Signature", "v1,AAAA v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	return header
}

func TestASignedWebhookIsAcceptedAndAnyOtherRefused(t *testing.T) {
	body := `{"type":"job.succeeded","timestamp":"2026-01-31T12:00:00Z","data":{}}`
	now := time.Now()
	event, err := VerifyWebhook(testSecret, signedAt(now, body), []byte(body))
	if err != nil || event.Type != "job.succeeded" {
		t.Fatal(event, err)
	}
	for name, refused := range map[string]func() error{
		"a changed body": func() error {
			_, err := VerifyWebhook(testSecret, signedAt(now, body), []byte(body+" "))
			return err
		},
		"another secret": func() error {
			_, err := VerifyWebhook("whsec_AAAA", signedAt(now, body), []byte(body))
			return err
		},
		"no secret": func() error {
			_, err := VerifyWebhook("", signedAt(now, body), []byte(body))
			return err
		},
		"an old request": func() error {
			old := signedAt(now.Add(-2*WebhookTolerance), body)
			_, err := VerifyWebhook(testSecret, old, []byte(body))
			return err
		},
		"no headers": func() error {
			_, err := VerifyWebhook(testSecret, http.Header{}, []byte(body))
			return err
		},
	} {
		if err := refused(); !errors.Is(err, ErrInvalidWebhook) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
