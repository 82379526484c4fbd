package keys_test

import (
	"encoding/json"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/keys"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestEveryPasswordOpensTheSameKey: two key files of one secret open with their own password alone, and neither file
// shows a password.
func TestEveryPasswordOpensTheSameKey(t *testing.T) {
	secret := blob.NewSecret()
	passwords := []string{"horse staple", "recovery"}
	for i, p := range passwords {
		content, err := keys.Wrap(secret, p, "node-1", "drover")
		must(t, err)
		if strings.Contains(string(content), p) {
			t.Errorf("the key file shows its password")
		}
		if got, err := keys.Unwrap(content, p); err != nil || got != secret {
			t.Errorf("password %d does not open its key file: %v", i, err)
		}
		_, err = keys.Unwrap(content, passwords[1-i])
		if !api.Is(err, api.Denied) || strings.Contains(err.Error(), passwords[1-i]) {
			t.Errorf("a wrong password: %v, want an error of kind denied without the password", err)
		}
	}
}

// hostile are parameters that would take memory or time without bound, or panic.
var hostile = []map[string]any{
	{"N": 1 << 21}, {"N": 32767}, {"N": 0}, {"N": -32768}, {"N": 1}, {"N": 1 << 20}, {"r": 0}, {"r": 1 << 30}, {"p": 0},
	{"p": -1}, {"p": 1 << 29}, {"N": 1 << 20, "r": 2, "p": 64}, {"kdf": "none"}, {"salt": ""},
	{"N": "x"},
}

// TestHostileParametersAreRefused: a key file of the store cannot make the opener work or allocate without bound.
func TestHostileParametersAreRefused(t *testing.T) {
	content, err := keys.Wrap(blob.NewSecret(), "x", "", "")
	must(t, err)
	for _, change := range hostile {
		_, err := keys.Unwrap(changed(t, content, change), "x")
		if !api.Is(err, api.Corrupt) && !api.Is(err, api.Unsupported) {
			t.Errorf("%v: %v, want an error of kind corrupt or unsupported", change, err)
		}
	}
	short := changed(t, content, map[string]any{"data": "AAAA"})
	if _, err := keys.Unwrap(short, "x"); !api.Is(err, api.Denied) {
		t.Errorf("a short master key: %v, want an error of kind denied", err)
	}
	if _, err := keys.Unwrap(make([]byte, keys.FileLimit+1), "x"); !api.Is(err, api.Corrupt) {
		t.Errorf("a large key file: %v, want an error of kind corrupt", err)
	}
}

func changed(t testing.TB, content []byte, change map[string]any) []byte {
	var fields map[string]any
	must(t, json.Unmarshal(content, &fields))
	for k, v := range change {
		fields[k] = v
	}
	out, err := json.Marshal(fields)
	must(t, err)
	return out
}

// FuzzUnwrap: no key file makes Unwrap panic or return an error without a kind. Costly parameters are made cheap first.
func FuzzUnwrap(f *testing.F) {
	content, err := keys.Wrap(blob.NewSecret(), "x", "", "")
	must(f, err)
	f.Add(changed(f, content, map[string]any{"N": 16}))
	for _, change := range hostile {
		f.Add(changed(f, content, change))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		var p struct{ N, R, P int }
		if json.Unmarshal(content, &p) == nil && p.N > 1024 && p.N <= 1<<20 {
			t.Skip("legal, but slow")
		}
		if _, err := keys.Unwrap(content, "x"); err == nil || api.Is(err, api.Other) {
			t.Errorf("%v, want an error with a kind", err)
		}
	})
}
