package address

import (
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/azure"
	"drover.io/drover/backups/target/s3"
	"drover.io/drover/backups/target/sftp"
	"drover.io/drover/backups/target/share"
	"drover.io/drover/backups/target/web"
)

// The pauses of the library between tries.
func init() { minio.DefaultRetryUnit, minio.DefaultRetryCap = time.Millisecond, time.Millisecond }

// secretWith is a Secret with credentials and the given keys and values in turn.
func secretWith(pairs ...string) map[string][]byte {
	secret := map[string][]byte{api.SecretAccessKey: []byte("key"), api.SecretSecretKey: []byte("hush")}
	for i := 0; i < len(pairs); i += 2 {
		secret[pairs[i]] = []byte(pairs[i+1])
	}
	return secret
}

// TestSecretFillsTheConfiguration: each key of the Secret reaches the S3 store, without line ends; an own server has
// the path style unless the Secret asks for the other.
func TestSecretFillsTheConfiguration(t *testing.T) {
	a, err := Parse("s3://backups@region/a/")
	must(t, err)
	full := secretWith(api.SecretAccessKey, "key\n", api.SecretSecretKey, "hush\r\n", api.SecretSessionToken, "token\n",
		api.SecretEndpoints, "https://minio.example\n", api.SecretCert, "cert\n", api.SecretVirtualHost, "true\n",
		api.SecretHTTPProxy, "http://u:p@proxy:1\n", api.SecretHTTPSProxy, "u:p@proxy:2\n", api.SecretNoProxy, "x,y\n")
	plain := s3.Config{Bucket: "backups", Region: "region", Prefix: "a", AccessKey: "key", SecretKey: "hush"}
	amazon, path, virtual := plain, plain, plain
	amazon.Addressing = s3.Auto
	path.Endpoint, path.Addressing = "http://minio.example", s3.Path
	virtual.Addressing = s3.VirtualHosted
	all := s3.Config{Endpoint: "https://minio.example", Region: "region", Bucket: "backups", Prefix: "a",
		Addressing: s3.VirtualHosted, AccessKey: "key", SecretKey: "hush", SessionToken: "token",
		Network: web.Network{CA: []byte("cert\n"), HTTPProxy: "http://u:p@proxy:1", HTTPSProxy: "http://u:p@proxy:2",
			NoProxy: "x,y"}}
	for i, c := range []struct {
		secret map[string][]byte
		want   s3.Config
	}{
		{secretWith(), amazon},
		{secretWith(api.SecretVirtualHost, "true"), virtual},
		{secretWith(api.SecretEndpoints, "http://minio.example"), path},
		{secretWith(api.SecretEndpoints, "http://minio.example", api.SecretVirtualHost, "false"), path},
		{full, all},
	} {
		if got, err := a.bucketConfig(c.secret); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("secret %d: the configuration is not as wanted: %v", i, err)
		}
	}
}

// TestRequestsFollowTheSecret: requests have the bucket in the path or the host, use the proxy, and trust the
// authorities of the Secret.
func TestRequestsFollowTheSecret(t *testing.T) {
	var seen string
	record := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		seen = fmt.Sprintf("%s %s%s %v", r.Method, r.Host, r.URL.Path,
			strings.Contains(r.Header.Get("Authorization"), "Credential=key/") &&
				strings.Contains(r.Header.Get("Authorization"), "/region/"))
	})
	server, secure := httptest.NewServer(record), httptest.NewTLSServer(record)
	defer server.Close()
	defer secure.Close()
	cert := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}))
	a, err := Parse("s3://backups@region/p/")
	must(t, err)
	for want, secret := range map[string]map[string][]byte{
		"PUT minio.example/backups/p/a true": secretWith(api.SecretEndpoints, "http://minio.example", api.SecretHTTPProxy,
			server.URL),
		"PUT backups.minio.example/p/a true": secretWith(api.SecretEndpoints, "http://minio.example", api.SecretHTTPProxy,
			server.URL, api.SecretVirtualHost, "true"),
		"PUT " + strings.TrimPrefix(secure.URL, "https://") + "/backups/p/a true": secretWith(api.SecretEndpoints,
			secure.URL, api.SecretCert, cert),
	} {
		store, err := a.Open(t.Context(), secret, nil)
		must(t, err)
		must(t, store.Put(t.Context(), "a", []byte("a")))
		must(t, store.(io.Closer).Close())
		if seen != want {
			t.Errorf("the server saw %q, want %q", seen, want)
		}
	}
}

// TestBadSecretsAreRefused: a Secret that cannot work is refused with the name of its key.
func TestBadSecretsAreRefused(t *testing.T) {
	a, err := Parse("s3://backups@region/")
	must(t, err)
	without := func(key string) map[string][]byte {
		secret := secretWith()
		delete(secret, key)
		return secret
	}
	for _, c := range []struct {
		secret map[string][]byte
		kind   api.Kind
		text   string
	}{
		{nil, api.Invalid, "AWS_ACCESS_KEY_ID is missing"},
		{without(api.SecretAccessKey), api.Invalid, "AWS_ACCESS_KEY_ID is missing"},
		{without(api.SecretSecretKey), api.Invalid, "AWS_SECRET_ACCESS_KEY is missing"},
		{secretWith(api.SecretSecretKey, "\r\n"), api.Invalid, "AWS_SECRET_ACCESS_KEY is missing"},
		{map[string][]byte{api.SecretRole: []byte("arn\nhush")}, api.Invalid, "AWS_IAM_ROLE_ARN has a control character"},
		{map[string][]byte{api.SecretRole: []byte("arn"), api.SecretEndpoints: []byte("https://hush.example")}, api.Invalid,
			"for Amazon's servers alone"},
		{secretWith(api.SecretSessionToken, "a\nb"), api.Invalid, "AWS_SESSION_TOKEN has a control character"},
		{secretWith(api.SecretEndpoints, "minio:9000"), api.Invalid, "not a URL like https://"},
		{secretWith(api.SecretCert, "cert"), api.Invalid, "no PEM certificate"},
		{secretWith(api.SecretHTTPProxy, "ftp://proxy"), api.Invalid, "HTTP_PROXY is not a URL"},
		{secretWith(api.SecretHTTPSProxy, "http://"), api.Invalid, "HTTPS_PROXY is not a URL"},
	} {
		if store, err := a.Open(t.Context(), c.secret, nil); store != nil || !api.Is(err, c.kind) ||
			!strings.Contains(err.Error(), c.text) {
			t.Errorf("%v: %v of kind %v, want kind %v and %q", store, err, api.KindOf(err), c.kind, c.text)
		}
	}
}

// TestErrorsHoldNoValueOfTheSecret: with a bad value of any key, neither the errors of Open and Password nor the errors
// of an operation on an unreachable server hold the value.
func TestErrorsHoldNoValueOfTheSecret(t *testing.T) {
	a, err := Parse("s3://backups@region/")
	must(t, err)
	const mark = "hush-hush-value"
	base := secretWith(api.SecretEndpoints, "http://127.0.0.1:1", api.SecretBackupPassword, "a")
	failures := 0
	for _, key := range []string{api.SecretAccessKey, api.SecretSecretKey, api.SecretSessionToken, api.SecretEndpoints,
		api.SecretCert, api.SecretVirtualHost, api.SecretHTTPProxy, api.SecretHTTPSProxy, api.SecretNoProxy,
		api.SecretBackupPassword, api.SecretResticPassword, api.SecretRole} {
		for _, value := range []string{mark, mark + "\x01" + mark, mark + "\n" + mark, "ftp://" + mark, "%zz" + mark,
			"http://user:" + mark + "@127.0.0.1:1", "http://user:" + mark + "@127.0.0.1:%zz", "user:" + mark + "@:a:b"} {
			secret := maps.Clone(base)
			secret[key] = []byte(value)
			if key == api.SecretHTTPProxy { // no proxy leads to this machine
				secret[api.SecretEndpoints] = []byte("http://minio.invalid")
			}
			_, _, failure := Password(secret)
			errs := []error{failure}
			store, err := a.Open(t.Context(), secret, nil)
			if errs = append(errs, err); err == nil && !(key == api.SecretHTTPProxy && value == mark) {
				errs = append(errs, store.Put(t.Context(), "a", []byte("a")))
			}
			for _, err := range errs {
				if err == nil {
					continue
				}
				if failures++; strings.Contains(err.Error(), mark) {
					t.Errorf("%s: the error holds the value %q: %v", key, value, err)
				}
			}
		}
	}
	if failures < 80 {
		t.Errorf("only %d errors", failures)
	}
}

// TestPasswordComesFromTheSecret: Password has the value of either key without line ends, else the published password,
// which is no password of the user.
func TestPasswordComesFromTheSecret(t *testing.T) {
	for _, c := range []struct {
		backup, restic, want string
		own                  bool
	}{
		{"", "", api.PublishedPassword, false},
		{"\n", "\r\n", api.PublishedPassword, false},
		{"correct horse\n", "", "correct horse", true},
		{"", " battery\r\n", " battery", true},
		{"staple", "staple\n", "staple", true},
		{"\n", "staple", "staple", true},
		{api.PublishedPassword, "", api.PublishedPassword, false},
	} {
		password, own, err := Password(map[string][]byte{api.SecretBackupPassword: []byte(c.backup),
			api.SecretResticPassword: []byte(c.restic)})
		if err != nil || password != c.want || own != c.own {
			t.Errorf("%q and %q: %q, %v, %v; want %q, %v", c.backup, c.restic, password, own, err, c.want, c.own)
		}
	}
	if password, own, err := Password(nil); err != nil || password != api.PublishedPassword || own {
		t.Errorf("without a Secret: %q, %v, %v", password, own, err)
	}
	_, _, err := Password(map[string][]byte{api.SecretBackupPassword: []byte("a"), api.SecretResticPassword: []byte("b")})
	if !api.Is(err, api.Invalid) || !strings.Contains(err.Error(), "BACKUP_PASSWORD and RESTIC_PASSWORD differ") {
		t.Errorf("two passwords: %v", err)
	}
}

// TestSharesTakeTheirKeysAlone: an SMB share has the user and the password of the Secret, NFS and guests have none.
func TestSharesTakeTheirKeysAlone(t *testing.T) {
	secret := map[string][]byte{api.SecretCIFSUser: []byte("me\n"), api.SecretCIFSPassword: []byte("hush\n")}
	for url, want := range map[string]share.Credentials{
		"cifs://server/a": {User: "me", Password: "hush"}, "nfs://server/a": {},
	} {
		a, err := Parse(url)
		must(t, err)
		if got, err := a.shareLogin(secret); err != nil || got != want {
			t.Errorf("%s: other credentials than wanted: %v", url, err)
		}
	}
	a, err := Parse("cifs://server/a")
	must(t, err)
	if got, err := a.shareLogin(nil); err != nil || got != (share.Credentials{}) {
		t.Errorf("a guest: %v, %v", got, err)
	}
	for _, bad := range []map[string][]byte{
		{api.SecretCIFSPassword: []byte("hush")},
		{api.SecretCIFSUser: []byte("me"), api.SecretCIFSPassword: []byte("a\nhush")},
		{api.SecretCIFSUser: []byte("me\x00"), api.SecretCIFSPassword: []byte("hush")},
	} {
		if _, err := a.shareLogin(bad); !api.Is(err, api.Invalid) || strings.Contains(err.Error(), "hush") {
			t.Errorf("a bad Secret: %v", err)
		}
	}
}

// TestAzureTakesItsKeys: the account names the server, unless the Secret has an endpoint.
func TestAzureTakesItsKeys(t *testing.T) {
	a, err := Parse("azblob://backups@core.windows.net/a/")
	must(t, err)
	secret := map[string][]byte{api.SecretAzureAccount: []byte("me1\n"), api.SecretAzureKey: []byte("aHVzaA==\n"),
		api.SecretHTTPSProxy: []byte("proxy:2"), api.SecretAzureCert: []byte("cert")}
	want := azure.Config{Account: "me1", Key: "aHVzaA==", Endpoint: "https://me1.blob.core.windows.net",
		Container: "backups", Prefix: "a", Network: web.Network{CA: []byte("cert"), HTTPSProxy: "http://proxy:2"}}
	if got, err := a.containerConfig(secret); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("the configuration is not as wanted: %+v, %v", got, err)
	}
	secret[api.SecretAzureEndpoint] = []byte("http://127.0.0.1:10000/me1")
	want.Endpoint = "http://127.0.0.1:10000/me1"
	if got, err := a.containerConfig(secret); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("the configuration with an endpoint is not as wanted: %+v, %v", got, err)
	}
	for key, bad := range map[string]string{api.SecretAzureAccount: "Hush/", api.SecretAzureKey: "",
		api.SecretAzureEndpoint: "a\nhush"} {
		changed := maps.Clone(secret)
		changed[key] = []byte(bad)
		if _, err := a.Open(t.Context(), changed, nil); !api.Is(err, api.Invalid) || !strings.Contains(err.Error(), key) ||
			strings.Contains(strings.ToLower(err.Error()), "hush") {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// TestServersTakeTheirKeys: an SSH server has a password or a key, and always the known hosts.
func TestServersTakeTheirKeys(t *testing.T) {
	a, err := Parse("sftp://me@server:2222/a")
	must(t, err)
	secret := map[string][]byte{api.SecretSFTPPassword: []byte("hush\n"), api.SecretSFTPKey: []byte("key\n"),
		api.SecretSFTPPassphrase: []byte("phrase\n"), api.SecretKnownHosts: []byte("hosts\n")}
	want := sftp.Config{Host: "server", Port: "2222", User: "me", Root: "/a", Password: "hush", PrivateKey: "key\n",
		Passphrase: "phrase", KnownHosts: []byte("hosts\n")}
	if got, err := a.serverConfig(secret); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("the configuration is not as wanted: %+v, %v", got, err)
	}
	for _, missing := range [][]string{{api.SecretKnownHosts}, {api.SecretSFTPPassword, api.SecretSFTPKey}} {
		changed := maps.Clone(secret)
		for _, key := range missing {
			delete(changed, key)
		}
		if _, err := a.Open(t.Context(), changed, nil); !api.Is(err, api.Invalid) ||
			!strings.Contains(err.Error(), missing[0]) {
			t.Errorf("without %v: %v", missing, err)
		}
	}
}

// TestRolesNeedNoKeys: a role takes the place of the keys; keys come first; the file of the token is the operator's.
func TestRolesNeedNoKeys(t *testing.T) {
	a, err := Parse("s3://backups@region/")
	must(t, err)
	t.Setenv(tokenVariable, "/var/token")
	role := map[string][]byte{api.SecretRole: []byte("arn:role\n")}
	got, err := a.bucketConfig(role)
	if err != nil || got.Role == nil || *got.Role != (s3.Role{ARN: "arn:role", TokenFile: "/var/token"}) {
		t.Errorf("a role: %+v, %v", got.Role, err)
	}
	if got, err := a.bucketConfig(secretWith(api.SecretRole, "arn:role")); err != nil || got.Role != nil {
		t.Errorf("keys and a role: %+v, %v", got.Role, err)
	}
	if _, err := a.bucketConfig(map[string][]byte{tokenVariable: []byte("/etc/shadow")}); !api.Is(err, api.Invalid) {
		t.Errorf("a token file of the Secret: %v", err)
	}
}
