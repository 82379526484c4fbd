package wire

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"time"

	"drover.io/drover/block/authority"
)

// CertificateLife is how long a certificate lives; nodes renew a certificate when a third of its life is left.
const CertificateLife = 90 * 24 * time.Hour

// Authority signs the certificates of nodes. The controller owns the authority.
type Authority struct{ *authority.Authority }

// NewAuthority makes an authority in the form that LoadAuthority reads: certificate and key in one PEM.
func NewAuthority() ([]byte, error) { return authority.New("drover nodes") }

// LoadAuthority reads the PEM of NewAuthority.
func LoadAuthority(both []byte) (*Authority, error) {
	a, err := authority.Load(both)
	if err != nil {
		return nil, fmt.Errorf("the authority of nodes: %w", err)
	}
	return &Authority{a}, nil
}

// Signed reports whether this authority signed a certificate (PEM), and until when the certificate is valid.
func (a *Authority) Signed(cert []byte) (until time.Time, ok bool) {
	block, _ := pem.Decode(cert)
	if block == nil {
		return time.Time{}, false
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !a.Authority.Signed(c) {
		return time.Time{}, false
	}
	return c.NotAfter, true
}

// Sign makes a certificate for a node from a request (PEM), of which only the public key counts.
func (a *Authority) Sign(request []byte, node string, life time.Duration) (cert []byte, until time.Time, err error) {
	block, _ := pem.Decode(request)
	if block == nil {
		return nil, until, errors.New("the request is no PEM")
	}
	req, err := x509.ParseCertificateRequest(block.Bytes)
	if err == nil {
		err = req.CheckSignature()
	}
	if err != nil {
		return nil, until, fmt.Errorf("the request cannot be read: %w", err)
	}
	if key, ok := req.PublicKey.(*ecdsa.PublicKey); !ok || key.Curve != elliptic.P256() {
		return nil, until, errors.New("the request's key is not one of P-256")
	}
	until = time.Now().Add(life).Truncate(time.Second)
	cert, err = a.Authority.Sign(req.PublicKey, x509.Certificate{Subject: pkix.Name{CommonName: node},
		URIs: []*url.URL{nodeURI(node)}, NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}})
	return cert, until, err
}

// nodeURI names a node in the node's certificate: the only name there that counts.
func nodeURI(node string) *url.URL { return &url.URL{Scheme: "drover", Host: "node", Path: "/" + node} }

// nodeOf is the node that a certificate names.
func nodeOf(c *x509.Certificate) (string, error) {
	for _, u := range c.URIs {
		if u.Scheme == "drover" && u.Host == "node" && len(u.Path) > 1 {
			return u.Path[1:], nil
		}
	}
	return "", errors.New("the certificate is not one of a node")
}

// fingerprint names a public key.
func fingerprint(key *ecdsa.PrivateKey) string {
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:4])
}
