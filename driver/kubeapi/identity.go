package kubeapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	mrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"drover.io/drover/api"
	"drover.io/drover/block/authority"
	"drover.io/drover/block/wire"
)

// identity authenticates the server to clients and clients to the server: authority, token and port.
type identity struct {
	dir     string
	token   string
	ca      *authority.Authority
	host    string // to listen on
	wish    string // port to listen on, if the user named one
	names   []string
	port    int
	serving dynamiccertificates.CertKeyContentProvider
}

const tenYears = 10 * 365 * 24 * time.Hour

const loopback = "127.0.0.1"

// openIdentity reads <dir>/pki, or creates the folder.
func openIdentity(dir, listen string, names []string) (*identity, error) {
	id := &identity{dir: filepath.Join(dir, "pki"), host: loopback, names: names}
	if listen != "" {
		id.host = listen
		if h, p, err := net.SplitHostPort(listen); err == nil {
			id.host, id.wish = h, p
		}
		if net.ParseIP(id.host) == nil {
			return nil, api.Errorf(api.Invalid, "%q is no address to listen on: use one of this machine, or 0.0.0.0", listen)
		}
	}
	if err := os.MkdirAll(id.dir, 0o700); err != nil {
		return nil, api.Errorf(api.Unavailable, "pki folder: %w", err)
	}
	token, err := id.loadOrCreate("token", func() ([]byte, error) { return []byte(randomToken()), nil })
	if err != nil {
		return nil, err
	}
	id.token = strings.TrimSpace(string(token))
	if len(id.token) < 32 {
		return nil, api.Errorf(api.Corrupt, "%s/token is too short: delete it to get a new one", id.dir)
	}
	// Certificate and key share a file, so that both always match.
	both, err := id.loadOrCreate("ca.pem", func() ([]byte, error) { return authority.New(authorityName()) })
	if err != nil {
		return nil, err
	}
	if id.ca, err = authority.Load(both); err != nil {
		return nil, api.Errorf(api.Corrupt, "%s/ca.pem is damaged (%w): delete it to get a new authority", id.dir, err)
	}
	// The serving certificate stays in memory and is new at every start, so that no certificate in use expires.
	cert, key, err := id.signCertificate(append([]string{"localhost", loopback, id.host}, names...)...)
	if err != nil {
		return nil, fmt.Errorf("serving certificate: %w", err)
	}
	id.serving, err = dynamiccertificates.NewStaticCertKeyContent("serving", cert, key)
	return id, err
}

// loadOrCreate reads a file of the pki folder, or creates the file, readable by its owner alone.
func (id *identity) loadOrCreate(name string, make func() ([]byte, error)) ([]byte, error) {
	path := filepath.Join(id.dir, name)
	b, err := os.ReadFile(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return b, err
	}
	if b, err = make(); err != nil {
		return nil, err
	}
	return b, writeFile(path, b)
}

// authorityName tells this server's authority from others.
func authorityName() string { return "drover " + randomToken()[:8] }

// Certificate returns a certificate for a server beside this server, with these names and addresses. ca is the
// authority in the kubeconfig, so that clients of the API trust the certificate.
func (s *Server) Certificate(hosts ...string) (cert tls.Certificate, ca []byte, err error) {
	return s.id.serverCertificate(hosts)
}

// NewCertificate returns a certificate of a new authority without a stored key.
func NewCertificate(hosts ...string) (cert tls.Certificate, ca []byte, err error) {
	both, err := authority.New(authorityName())
	if err != nil {
		return cert, nil, err
	}
	a, err := authority.Load(both)
	if err != nil {
		return cert, nil, err
	}
	return (&identity{ca: a}).serverCertificate(hosts)
}

func (id *identity) serverCertificate(hosts []string) (cert tls.Certificate, ca []byte, err error) {
	certPEM, key, err := id.signCertificate(hosts...)
	if err == nil {
		cert, err = tls.X509KeyPair(certPEM, key)
	}
	return cert, id.ca.PEM(), err
}

// signCertificate signs a server certificate for names and addresses.
func (id *identity) signCertificate(hosts ...string) (cert, key []byte, err error) {
	k, err := authority.NewKey()
	if err != nil {
		return nil, nil, err
	}
	want := x509.Certificate{Subject: pkix.Name{CommonName: "drover"}, NotAfter: time.Now().Add(tenYears),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			want.IPAddresses = append(want.IPAddresses, ip)
		} else if h != "" {
			want.DNSNames = append(want.DNSNames, h)
		}
	}
	if cert, err = id.ca.Sign(k.Public(), want); err != nil {
		return nil, nil, err
	}
	key, err = authority.KeyPEM(k)
	return cert, key, err
}

// listenPort opens the port of the last start, or a free port below the kernel's range for outgoing connections.
func (id *identity) listenPort() (net.Listener, error) {
	path := filepath.Join(id.dir, "port")
	if id.wish != "" && id.wish != "0" {
		ln, err := wire.Listen(net.JoinHostPort(id.host, id.wish))
		if err != nil {
			return nil, api.Errorf(api.Unavailable, "the API server cannot listen: %w", err)
		}
		id.port = ln.Addr().(*net.TCPAddr).Port
		return ln, writeFile(path, []byte(strconv.Itoa(id.port)+"\n"))
	}
	if b, err := os.ReadFile(path); err == nil {
		if port, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			ln, err := wire.Listen(net.JoinHostPort(id.host, strconv.Itoa(port)))
			if err == nil {
				id.port = port
				return ln, nil
			}
		}
	}
	var last error
	for range 100 {
		port := 20000 + mrand.IntN(12000)
		ln, err := wire.Listen(net.JoinHostPort(id.host, strconv.Itoa(port)))
		if err == nil {
			id.port = port
			return ln, writeFile(path, []byte(strconv.Itoa(port)+"\n"))
		}
		if last = err; !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, api.Errorf(api.Unavailable, "no port on %s for the API server: %w", id.host, last)
}

// AuthenticateToken accepts the only user. A comparison of digests has the same duration for every token.
func (id *identity) AuthenticateToken(_ context.Context, token string) (*authenticator.Response, bool, error) {
	got, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(id.token))
	if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
		return nil, false, nil
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: "admin",
		Groups: []string{user.SystemPrivilegedGroup}}}, true, nil
}

// localURL returns the URL for clients on this machine.
func (id *identity) localURL() string {
	host := id.host
	if net.ParseIP(host).IsUnspecified() {
		host = loopback
	}
	return "https://" + net.JoinHostPort(host, strconv.Itoa(id.port))
}

// joinURL returns the URL for clients on other machines, or "".
func (id *identity) joinURL() string {
	ip := net.ParseIP(id.host)
	switch {
	case ip.IsLoopback():
		return ""
	case len(id.names) > 0:
		return "https://" + net.JoinHostPort(id.names[0], strconv.Itoa(id.port))
	}
	return id.localURL()
}

func (id *identity) clientConfig() *rest.Config {
	return &rest.Config{Host: id.localURL(), BearerToken: id.token, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: id.ca.PEM()}}
}

func (id *identity) writeKubeconfig(path, url string) error {
	kc := clientcmdapi.NewConfig()
	kc.Clusters["drover"] = &clientcmdapi.Cluster{Server: url, CertificateAuthorityData: id.ca.PEM()}
	kc.AuthInfos["drover"] = &clientcmdapi.AuthInfo{Token: id.token}
	kc.Contexts["drover"] = &clientcmdapi.Context{Cluster: "drover", AuthInfo: "drover"}
	kc.CurrentContext = "drover"
	b, err := clientcmd.Write(*kc)
	if err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	return writeFile(path, b)
}

// writeFile replaces a file atomically and durably. Only the owner may read the file.
func writeFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return api.Errorf(api.Unavailable, "write %s: %w", path, err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return api.Errorf(api.Unavailable, "write %s: %w", path, err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
