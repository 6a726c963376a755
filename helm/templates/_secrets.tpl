{{/* Secrets that the chart makes once. Both templates take the root. */}}

{{- define "kvrelay.keys.secretName" -}}
{{- default (printf "%s-keys" (include "kvrelay.fullname" .)) .Values.security.keys.existingSecret -}}
{{- end -}}

{{- define "kvrelay.apiKeys.secretName" -}}
{{- default (printf "%s-api-keys" (include "kvrelay.fullname" .)) .Values.security.apiKeys.existingSecret -}}
{{- end -}}

{{/* A pod's volume with its own private key and the public keys of all roles: (dict "root" $ "role" ROLE). */}}
{{- define "kvrelay.keys.volume" -}}
{{- if .root.Values.security.keys.enabled -}}
- name: keys
  secret:
    secretName: {{ include "kvrelay.keys.secretName" .root }}
    defaultMode: 0440
    items:
      - {key: {{ .role }}.key, path: {{ .role }}.key}
      - {key: gateway.pem, path: gateway.pem}
      - {key: prefill.pem, path: prefill.pem}
      - {key: decode.pem, path: decode.pem}
{{- end -}}
{{- end -}}

{{- define "kvrelay.keys.mount" -}}
{{- if .Values.security.keys.enabled -}}
- name: keys
  mountPath: /keys
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "kvrelay.keys.env" -}}
{{- if .Values.security.keys.enabled -}}
- name: KVRELAY_KEYS
  value: /keys
{{- end -}}
{{- end -}}
