package s3

import (
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/web"
)

// Role is a role of Amazon's IAM, or of a server with the same protocol, that gives credentials for a time.
type Role struct {
	// ARN names the role.
	ARN string
	// TokenFile has the token of a web identity, as Kubernetes writes it for a service account; the store reads the file
	// for each new credentials. Empty: the metadata server of the machine or container gives the credentials.
	TokenFile string

	metadata string // URL of the metadata server; empty: Amazon's address
}

// maxToken bounds the memory for a token.
const maxToken = 64 << 10

// login returns the source of credentials: the keys, or the role.
func (s *Store) login() (*credentials.Credentials, error) {
	role := s.cfg.Role
	switch {
	case s.cfg.AccessKey != "" && s.cfg.SecretKey != "":
		return credentials.NewStaticV4(string(s.cfg.AccessKey), string(s.cfg.SecretKey), string(s.cfg.SessionToken)), nil
	case role == nil:
		return nil, api.Errorf(api.Invalid, "%s: access key or secret key is missing; give both", s)
	case role.TokenFile != "":
		return credentials.New(&credentials.STSWebIdentity{
			Client:              &http.Client{Transport: web.RoundTripper{Next: s.transport}},
			STSEndpoint:         s.cfg.tokenService(),
			GetWebIDTokenExpiry: func() (*credentials.WebIdentityToken, error) { return s.readToken(role.TokenFile) },
			RoleARN:             role.ARN,
		}), nil
	case !s.cfg.isAmazon() && role.metadata == "":
		return nil, api.Errorf(api.Invalid, "%s: the credentials of a machine are for Amazon's servers alone; give an "+
			"access key and a secret key", s)
	}
	metadata := &http.Transport{ResponseHeaderTimeout: 10 * time.Second, DisableKeepAlives: true} // without a proxy
	return credentials.New(&credentials.IAM{Client: &http.Client{Transport: web.RoundTripper{Next: metadata},
		Timeout: 10 * time.Second}, Endpoint: role.metadata, Region: s.cfg.Region}), nil
}

// readToken reads the token of a web identity. The path is the operator's, not the Secret's.
func (s *Store) readToken(path string) (*credentials.WebIdentityToken, error) {
	token, err := os.ReadFile(path)
	if err == nil && len(token) > maxToken {
		err = api.Errorf(api.Invalid, "longer than %d bytes", maxToken)
	}
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "token of the web identity: cannot read the file: %w", err)
	}
	return &credentials.WebIdentityToken{Token: strings.TrimSpace(string(token))}, nil
}

// isAmazon reports whether the server is one of Amazon's.
func (c Config) isAmazon() bool {
	u, err := url.Parse(c.Endpoint)
	if err != nil {
		return false
	}
	host := strings.ToLower(u.Hostname())
	return host == "" || strings.HasSuffix(host, ".amazonaws.com") || strings.HasSuffix(host, ".amazonaws.com.cn")
}

// tokenService is the URL of the server that exchanges a token for credentials: Amazon's STS, or the server itself.
func (c Config) tokenService() string {
	switch {
	case !c.isAmazon():
		return c.Endpoint
	case c.Region == "":
		return "https://sts.amazonaws.com"
	case strings.HasPrefix(c.Region, "cn-"):
		return "https://sts." + c.Region + ".amazonaws.com.cn"
	}
	return "https://sts." + c.Region + ".amazonaws.com"
}
