package address

import (
	"net/url"
	"os"
	"slices"
	"strings"
	"unicode"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/azure"
	"drover.io/drover/backups/target/s3"
	"drover.io/drover/backups/target/sftp"
	"drover.io/drover/backups/target/share"
	"drover.io/drover/backups/target/web"
)

// tokenVariable is the environment variable with the file of a web identity's token. The operator sets it, or a webhook
// of the cluster; a Secret does not, because the store sends the content of the file to a server of the Secret.
const tokenVariable = "AWS_WEB_IDENTITY_TOKEN_FILE"

// Password is the password of the repository. own is false if everybody knows the password. Errors are of kind Invalid.
func Password(secret map[string][]byte) (password string, own bool, err error) {
	backup, restic := value(secret, api.SecretBackupPassword), value(secret, api.SecretResticPassword)
	switch {
	case backup != "" && restic != "" && backup != restic:
		return "", false, api.Errorf(api.Invalid, "Secret of the backup target: %s and %s differ; remove one of them",
			api.SecretBackupPassword, api.SecretResticPassword)
	case backup != "":
		password = backup
	case restic != "":
		password = restic
	default:
		password = api.PublishedPassword
	}
	return password, password != api.PublishedPassword, nil
}

// OtherPasswords are the passwords that the password of Password replaces, and the second one that opens the
// repository, too. The own password of a user replaces the published one.
func OtherPasswords(secret map[string][]byte) (old []string, recovery string) {
	for _, key := range []string{api.SecretOldBackupPassword, api.SecretOldResticPassword} {
		if password := value(secret, key); password != "" {
			old = append(old, password)
		}
	}
	if _, own, err := Password(secret); own && err == nil {
		old = append(old, api.PublishedPassword)
	}
	return old, value(secret, api.SecretRecoveryPassword)
}

// value is the value of a key without line ends, which editors and tools leave at the end.
func value(secret map[string][]byte, key string) string {
	return strings.TrimRight(string(secret[key]), "\r\n")
}

// refuseControl refuses values of the keys with control characters.
func refuseControl(secret map[string][]byte, keys ...string) error {
	for _, key := range keys {
		if strings.ContainsFunc(value(secret, key), unicode.IsControl) {
			return api.Errorf(api.Invalid, "Secret of the backup target: %s has a control character; remove it", key)
		}
	}
	return nil
}

// shareLogin are the credentials of an SMB share. NFS has none.
func (a Address) shareLogin(secret map[string][]byte) (share.Credentials, error) {
	if !a.share.Is(share.CIFS) {
		return share.Credentials{}, nil
	}
	login := share.Credentials{User: value(secret, api.SecretCIFSUser), Password: value(secret, api.SecretCIFSPassword)}
	if login.User == "" && login.Password != "" {
		return share.Credentials{}, api.Errorf(api.Invalid, "Secret of the backup target: %s is missing; give %s and %s",
			api.SecretCIFSUser, api.SecretCIFSUser, api.SecretCIFSPassword)
	}
	return login, refuseControl(secret, api.SecretCIFSUser, api.SecretCIFSPassword)
}

// bucketConfig is the configuration of an S3 store.
func (a Address) bucketConfig(secret map[string][]byte) (s3.Config, error) {
	role := a.role(secret)
	for _, key := range []string{api.SecretAccessKey, api.SecretSecretKey} {
		if value(secret, key) == "" && role == nil {
			return s3.Config{}, api.Errorf(api.Invalid, "Secret of the backup target: %s is missing; give %s and %s, or %s", key,
				api.SecretAccessKey, api.SecretSecretKey, api.SecretRole)
		}
	}
	if err := refuseControl(secret, api.SecretAccessKey, api.SecretSecretKey, api.SecretSessionToken, api.SecretEndpoints,
		api.SecretNoProxy, api.SecretRole); err != nil {
		return s3.Config{}, err
	}
	config := s3.Config{
		Endpoint:     value(secret, api.SecretEndpoints),
		Region:       a.region,
		Bucket:       a.bucket,
		Prefix:       a.prefix,
		AccessKey:    web.Secret(value(secret, api.SecretAccessKey)),
		SecretKey:    web.Secret(value(secret, api.SecretSecretKey)),
		SessionToken: web.Secret(value(secret, api.SecretSessionToken)),
		Role:         role,
	}
	switch {
	case value(secret, api.SecretVirtualHost) == "true":
		config.Addressing = s3.VirtualHosted
	case config.Endpoint != "":
		config.Addressing = s3.Path
	}
	var err error
	config.Network, err = network(secret, api.SecretCert)
	return config, err
}

// role is the role of an S3 store without keys, or nil.
func (a Address) role(secret map[string][]byte) *s3.Role {
	arn := value(secret, api.SecretRole)
	if arn == "" || value(secret, api.SecretAccessKey) != "" || value(secret, api.SecretSecretKey) != "" {
		return nil
	}
	return &s3.Role{ARN: arn, TokenFile: os.Getenv(tokenVariable)}
}

// containerConfig is the configuration of an Azure store.
func (a Address) containerConfig(secret map[string][]byte) (azure.Config, error) {
	for _, key := range []string{api.SecretAzureAccount, api.SecretAzureKey} {
		if value(secret, key) == "" {
			return azure.Config{}, api.Errorf(api.Invalid, "Secret of the backup target: %s is missing; give %s and %s", key,
				api.SecretAzureAccount, api.SecretAzureKey)
		}
	}
	account := value(secret, api.SecretAzureAccount)
	if !accountName.MatchString(account) {
		return azure.Config{}, api.Errorf(api.Invalid, "Secret of the backup target: %s is not the name of an account; "+
			"write small letters and digits", api.SecretAzureAccount)
	}
	if err := refuseControl(secret, api.SecretAzureKey, api.SecretAzureEndpoint, api.SecretNoProxy); err != nil {
		return azure.Config{}, err
	}
	config := azure.Config{Account: account, Key: web.Secret(value(secret, api.SecretAzureKey)),
		Endpoint: value(secret, api.SecretAzureEndpoint), Container: a.container, Prefix: a.prefix}
	if config.Endpoint == "" {
		config.Endpoint = "https://" + account + ".blob." + a.cloud
	}
	var err error
	config.Network, err = network(secret, api.SecretAzureCert)
	return config, err
}

// serverConfig is the configuration of an SFTP store.
func (a Address) serverConfig(secret map[string][]byte) (sftp.Config, error) {
	switch {
	case value(secret, api.SecretSFTPPassword) == "" && value(secret, api.SecretSFTPKey) == "":
		return sftp.Config{}, api.Errorf(api.Invalid, "Secret of the backup target: %s and %s are missing; give one of them",
			api.SecretSFTPPassword, api.SecretSFTPKey)
	case value(secret, api.SecretKnownHosts) == "":
		return sftp.Config{}, api.Errorf(api.Invalid, "Secret of the backup target: %s is missing; give the server's line "+
			"of ssh-keyscan, after a comparison with the server", api.SecretKnownHosts)
	}
	return sftp.Config{Host: a.host, Port: a.port, User: a.user, Root: a.root,
			Password:   web.Secret(value(secret, api.SecretSFTPPassword)),
			PrivateKey: web.Secret(secret[api.SecretSFTPKey]),
			Passphrase: web.Secret(value(secret, api.SecretSFTPPassphrase)),
			KnownHosts: secret[api.SecretKnownHosts]},
		refuseControl(secret, api.SecretSFTPPassword, api.SecretSFTPPassphrase)
}

// network is the way to the server of a store.
func network(secret map[string][]byte, certKey string) (n web.Network, err error) {
	n = web.Network{CA: secret[certKey], NoProxy: value(secret, api.SecretNoProxy)}
	if n.HTTPProxy, err = proxy(secret, api.SecretHTTPProxy); err != nil {
		return n, err
	}
	n.HTTPSProxy, err = proxy(secret, api.SecretHTTPSProxy)
	return n, err
}

// proxy is the URL of a proxy. As in the environment variables, http:// may be missing.
func proxy(secret map[string][]byte, key string) (web.Secret, error) {
	text := value(secret, key)
	if text != "" && !strings.Contains(text, "://") {
		text = "http://" + text
	}
	u, err := url.Parse(text)
	if text != "" && (err != nil || u.Host == "" ||
		!slices.Contains([]string{"http", "https", "socks5", "socks5h"}, u.Scheme)) {
		return "", api.Errorf(api.Invalid, "Secret of the backup target: %s is not a URL of a proxy; write "+
			"http://HOST:PORT", key)
	}
	return web.Secret(text), nil
}
