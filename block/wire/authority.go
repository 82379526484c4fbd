package wire

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"time"
)

// Certificates live for CertificateLife; nodes renew a certificate when a third of its life is left.
const (
	CertificateLife = 90 * 24 * time.Hour
	authorityLife   = 30 * 365 * 24 * time.Hour
	backdate        = time.Hour // clocks differ
)

// Authority signs the certificates of nodes. The controller owns the authority.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte // the certificate
}

// NewAuthority makes an authority in the form that LoadAuthority reads: certificate and key in one PEM.
func NewAuthority() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{SerialNumber: serial(), Subject: pkix.Name{CommonName: "drover nodes"},
		NotBefore: time.Now().Add(-backdate), NotAfter: time.Now().Add(authorityLife), IsCA: true,
		BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return encode(der, key)
}

// LoadAuthority reads the PEM of NewAuthority.
func LoadAuthority(both []byte) (*Authority, error) {
	cert, key, err := decode(both)
	if err != nil {
		return nil, fmt.Errorf("the authority of nodes: %w", err)
	}
	return &Authority{cert: cert, key: key,
		pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})}, nil
}

// PEM is the authority's certificate.
func (a *Authority) PEM() []byte { return a.pem }

// Signed reports whether this authority signed a certificate (PEM), and until when the certificate is valid.
func (a *Authority) Signed(cert []byte) (until time.Time, ok bool) {
	block, _ := pem.Decode(cert)
	if block == nil {
		return time.Time{}, false
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil || c.CheckSignatureFrom(a.cert) != nil {
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
	t := &x509.Certificate{SerialNumber: serial(), Subject: pkix.Name{CommonName: node}, URIs: []*url.URL{nodeURI(node)},
		NotBefore: time.Now().Add(-backdate), NotAfter: until, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, req.PublicKey, a.key)
	if err != nil {
		return nil, until, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), until, nil
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

func encode(cert []byte, key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	return append(b, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})...), nil
}

func decode(both []byte) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	var cert *x509.Certificate
	var key *ecdsa.PrivateKey
	for block, rest := pem.Decode(both); block != nil; block, rest = pem.Decode(rest) {
		var err error
		switch block.Type {
		case "CERTIFICATE":
			cert, err = x509.ParseCertificate(block.Bytes)
		case "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(block.Bytes)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	switch {
	case cert == nil || key == nil:
		return nil, nil, errors.New("no certificate, or no key")
	case !key.PublicKey.Equal(cert.PublicKey):
		return nil, nil, errors.New("the key is not that of the certificate")
	}
	return cert, key, nil
}

func serial() *big.Int {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails
	return new(big.Int).SetBytes(bytes.TrimLeft(b, "\x00"))
}
