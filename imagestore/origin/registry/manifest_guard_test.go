package registry

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"drover.io/drover/api"
)

type answerOf string

func (a answerOf) RoundTrip(req *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Request: req,
		Body: io.NopCloser(strings.NewReader(string(a)))}, nil
}

// TestManifestGuardBoundsWhatTheLibraryReads: a manifest beyond the limits never reaches the library's parser; other
// answers pass unchanged.
func TestManifestGuardBoundsWhatTheLibraryReads(t *testing.T) {
	list := func(n int) string { return `{"layers":[` + strings.TrimSuffix(strings.Repeat("{},", n), ",") + `]}` }
	nested := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	var wide bytes.Buffer
	wide.WriteByte('[')
	for i := range maxEntries {
		if i > 0 {
			wide.WriteByte(',')
		}
		wide.WriteString("[" + strings.TrimSuffix(strings.Repeat("0,", maxEntries/2), ",") + "]")
	}
	wide.WriteByte(']')
	for name, c := range map[string]struct {
		body string
		err  string
	}{
		"a thousand entries":  {list(maxEntries), ""},
		"one entry more":      {list(maxEntries + 1), "list of more than 1000 entries"},
		"many members":        {`{` + strings.TrimSuffix(strings.Repeat(`"a":1,`, maxEntries+1), ",") + `}`, "more than 1000 entries"},
		"many parts in all":   {wide.String(), "more than 100000 parts"},
		"depth within bounds": {nested(9000), ""},
		"no JSON":             {"]}{", ""},
		"too large":           {`"` + strings.Repeat("x", maxManifest) + `"`, "larger than 4 MiB"},
	} {
		guard := &manifestGuard{base: answerOf(c.body)}
		req, err := http.NewRequestWithContext(guardManifests(t.Context()), http.MethodGet, "https://registry.example.com/", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := guard.RoundTrip(req)
		if err == nil {
			defer resp.Body.Close()
		}
		if c.err != "" {
			if !api.Is(err, api.OutOfRange) || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: got %v, want %q", name, err, c.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := io.ReadAll(resp.Body); err != nil || string(got) != c.body {
			t.Errorf("%s: %d bytes pass, %v", name, len(got), err)
		}
		blob, err := guard.RoundTrip(req.WithContext(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		defer blob.Body.Close()
		if got, err := io.ReadAll(blob.Body); err != nil || string(got) != c.body {
			t.Errorf("%s as a blob: %d bytes pass, %v", name, len(got), err)
		}
	}
}
