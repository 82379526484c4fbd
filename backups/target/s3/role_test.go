package s3

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
)

// roleServer is an S3 server that also gives credentials of roles, as MinIO's does, and a metadata server.
type roleServer struct {
	*httptest.Server
	mu     sync.Mutex
	tokens []string // of the calls for credentials
	seen   map[string]bool
	life   time.Duration // of the credentials
	refuse bool
}

func newRoleServer(t *testing.T) *roleServer {
	t.Helper()
	r := &roleServer{seen: map[string]bool{}, life: time.Hour}
	objects := newHandler(t)
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		defer r.mu.Unlock()
		expires := time.Now().Add(r.life).UTC().Format(time.RFC3339)
		switch {
		case req.Method == http.MethodPost && req.URL.Path == "/":
			_ = req.ParseForm()
			r.tokens = append(r.tokens, req.Form.Get("WebIdentityToken")+" for "+req.Form.Get("RoleArn"))
			if r.refuse {
				w.WriteHeader(http.StatusForbidden)
				fmt.Fprint(w, `<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
					<Error><Code>AccessDenied</Code><Message>no trust</Message></Error></ErrorResponse>`)
				return
			}
			fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
				<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>key-%d</AccessKeyId>
				<SecretAccessKey>hush</SecretAccessKey>
				<SessionToken>session-%d</SessionToken><Expiration>%s</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
				</AssumeRoleWithWebIdentityResponse>`, len(r.tokens), len(r.tokens), expires)
		case req.URL.Path == "/latest/api/token":
			fmt.Fprint(w, "metadata-token")
		case strings.HasPrefix(req.URL.Path, "/latest/meta-data/iam/security-credentials/"):
			if req.Header.Get("X-aws-ec2-metadata-token") != "metadata-token" {
				w.WriteHeader(http.StatusUnauthorized)
			} else if strings.HasSuffix(req.URL.Path, "/node") {
				fmt.Fprintf(w, `{"Code":"Success","AccessKeyId":"key-node","SecretAccessKey":"hush","Token":"session-node",
					"Expiration":%q}`, expires)
			} else {
				fmt.Fprint(w, "node")
			}
		default:
			_, credential, _ := strings.Cut(req.Header.Get("Authorization"), "Credential=")
			id, _, _ := strings.Cut(credential, "/")
			r.seen[id+" "+req.Header.Get("X-Amz-Security-Token")] = true
			objects.ServeHTTP(w, req)
		}
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *roleServer) store(t *testing.T, role *Role) *Store {
	t.Helper()
	s, err := New(Config{Endpoint: r.URL, Region: "us-east-1", Bucket: bucket, Role: role})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// TestWebIdentityGivesCredentials: the store exchanges the token of the file for credentials of the role, uses them
// while they are valid, and reads the file again for the next ones.
func TestWebIdentityGivesCredentials(t *testing.T) {
	server := newRoleServer(t)
	file := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(file, []byte("first\n"), 0o600))
	s := server.store(t, &Role{ARN: "arn:role", TokenFile: file})
	must(t, s.Put(t.Context(), "a", []byte("a")))
	must(t, s.Put(t.Context(), "b", []byte("b")))
	if got := fmt.Sprint(server.tokens, server.seen); got != "[first for arn:role] map[key-1 session-1:true]" {
		t.Errorf("the server saw %s", got)
	}
	must(t, os.WriteFile(file, []byte("second"), 0o600))
	server.life = -time.Hour
	s = server.store(t, &Role{ARN: "arn:role", TokenFile: file})
	must(t, s.Put(t.Context(), "a", []byte("a"))) // with credentials that are out of date at once
	must(t, os.WriteFile(file, []byte("third"), 0o600))
	must(t, s.Put(t.Context(), "a", []byte("a")))
	if got := strings.Join(server.tokens, " "); !strings.Contains(got, "second for arn:role") ||
		!strings.HasSuffix(got, "third for arn:role") {
		t.Errorf("the server saw %s", got)
	}
}

// TestRefusedRoleIsDenied: a server that gives no credentials, and a token that cannot be read, are errors with a kind
// and without the token.
func TestRefusedRoleIsDenied(t *testing.T) {
	server := newRoleServer(t)
	server.refuse = true
	file := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(file, []byte("hush"), 0o600))
	err := server.store(t, &Role{ARN: "arn:role", TokenFile: file}).Put(t.Context(), "a", nil)
	if !api.Is(err, api.Denied) || !strings.Contains(err.Error(), "no trust") || strings.Contains(err.Error(), "hush") {
		t.Errorf("put: %v of kind %v", err, api.KindOf(err))
	}
	for name, text := range map[string][]byte{"missing": nil, "too-long": make([]byte, maxToken+1)} {
		path := file + name
		if text != nil {
			must(t, os.WriteFile(path, text, 0o600))
		}
		err := server.store(t, &Role{ARN: "arn:role", TokenFile: path}).Put(t.Context(), "a", nil)
		if !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "token of the web identity") {
			t.Errorf("%s: %v of kind %v", name, err, api.KindOf(err))
		}
	}
}

// TestMachineGivesCredentials: without a token the metadata server gives the credentials, and only for Amazon's
// servers.
func TestMachineGivesCredentials(t *testing.T) {
	server := newRoleServer(t)
	must(t, server.store(t, &Role{ARN: "arn:role", metadata: server.URL}).Put(t.Context(), "a", []byte("a")))
	if got := fmt.Sprint(server.tokens, server.seen); got != "[] map[key-node session-node:true]" {
		t.Errorf("the server saw %s", got)
	}
	for endpoint, amazon := range map[string]bool{"": true, "https://s3.eu-west-1.amazonaws.com": true,
		"https://s3.cn-north-1.amazonaws.com.cn:443": true, "https://amazonaws.com.example": false,
		"https://myamazonaws.com": false, server.URL: false} {
		s, err := New(Config{Endpoint: endpoint, Bucket: bucket, Role: &Role{ARN: "arn:role"}})
		if amazon != (err == nil) || err != nil && !api.Is(err, api.Invalid) {
			t.Errorf("%q: %v, %v", endpoint, s, err)
		}
	}
}

// TestTokenServiceFollowsTheServer: Amazon's STS of the region, or the server itself, takes the token.
func TestTokenServiceFollowsTheServer(t *testing.T) {
	for want, c := range map[string]Config{
		"https://sts.amazonaws.com":               {},
		"https://sts.eu-west-1.amazonaws.com":     {Region: "eu-west-1", Endpoint: "https://s3.eu-west-1.amazonaws.com"},
		"https://sts.cn-north-1.amazonaws.com.cn": {Region: "cn-north-1"},
		"https://minio.example:9000":              {Region: "eu-west-1", Endpoint: "https://minio.example:9000"},
	} {
		if got := c.tokenService(); got != want {
			t.Errorf("%+v: %s, want %s", c, got, want)
		}
	}
}
